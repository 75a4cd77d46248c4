"""What the caller, the fork server and the ranks say to each other about one run."""

import enum
import os
import signal
import struct
from dataclasses import dataclass

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""On this signal a rank writes down where it stands. Windows has none."""


class News(enum.IntEnum):
    """What a record on the doorbell says of a rank; the number that goes with it is in brackets."""

    STARTED = 1  # (process id)
    NOT_STARTED = 2  # (errno)
    DONE = 3
    FAILED = 4
    EXITED = 5  # (exit code, or minus the signal)


COMPUTE = "compute"
"""What `Job.record` says if operators are counted too."""

RECORD = struct.Struct("<Biq")
"""One piece of news: what, the rank, a number. Small enough to arrive whole, also with many writers."""


@dataclass(frozen=True)
class Job:
    """What every rank of one run must know. The function itself, with its arguments, is in the file `work`."""

    world_size: int
    directory: str
    seed: int
    timeout: float
    environment: dict[str, str]
    working_directory: str
    import_path: tuple[str, ...]
    record: bool | str

    def path(self, what: str, rank: int | None = None) -> str:
        """A file of this run: `work` and `store` are common; `output`, `stack`, `result`, `failure`, `rows`, `tables` are a rank's own."""
        return os.path.join(self.directory, what if rank is None else f"{what}-{rank}")


HEADER = struct.Struct("<Q")
"""Before each pickled `Job` that the fork server is sent: its length in bytes. The run's socket comes with it."""

TELL_STACKS = b"s"
"""What a caller may ask on a run's socket."""
