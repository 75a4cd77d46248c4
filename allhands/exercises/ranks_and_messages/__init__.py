"""The tasks of the lesson `ranks_and_messages`."""

ORDER = ("predict", "deliver", "largest", "shift", "root_barrier", "deliver_any_shape")
