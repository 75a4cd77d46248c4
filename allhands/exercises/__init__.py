"""The tasks of all lessons. A topic is a package here, a task a module of it: `ring_all_reduce.reduce_scatter`."""

import difflib
from importlib import import_module
from pkgutil import iter_modules

from allhands.errors import without_traceback
from allhands.exercise import Task


def topics() -> list[str]:
    """All topics that have tasks, sorted by name."""
    return sorted(module.name for module in iter_modules(__path__) if module.ispkg)


def task_ids(topic: str) -> list[str]:
    """The ids of a topic's tasks, in the order of its lesson."""
    return [f"{topic}.{name}" for name in import_module(f"allhands.exercises.{topic}").ORDER]


def find(task_id: str) -> Task:
    """The task of this id. Raises ValueError, with the nearest that there are, for one that there is not."""
    task_id = task_id.strip() if isinstance(task_id, str) else task_id
    topic, _, name = str(task_id).partition(".")
    known = [each for topic in topics() for each in task_ids(topic)]
    if task_id in known:
        return import_module(f"allhands.exercises.{topic}.{name}").TASK
    near = task_ids(topic) if topic in topics() and not name else difflib.get_close_matches(str(task_id)[:100], known, n=3, cutoff=0.3)
    raise without_traceback(ValueError(f"there is no task {repr(task_id)[:60]}. Is it one of these? {', '.join(near or known)}"))
