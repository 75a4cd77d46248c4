"""stub"""


def note(task_id: str) -> None:
    """Stub."""
