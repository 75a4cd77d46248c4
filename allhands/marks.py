"""Which tasks are done. They are kept in the learner's `work/progress.json`, and nowhere else is anything kept."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from urllib.parse import quote

from allhands import course, exercises
from allhands.palette import NEUTRAL, RANKS

try:
    import fcntl
except ImportError:  # Windows. There, of two right answers in the same millisecond one may be forgotten.
    fcntl = None

_LONGEST_WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class Standing:
    """How far a lesson is done: so many of its tasks."""

    done: int
    of: int

    def __str__(self) -> str:
        return f"{self.done} of {self.of} in this lesson"


@dataclass(frozen=True)
class Marks:
    """What is kept: the ids of the tasks that are done, and of each lesson that was begun a digest of the text it was begun from."""

    done: frozenset[str] = frozenset()
    begun_from: dict[str, str] = field(default_factory=dict)

    def standing(self, topic: str) -> Standing:
        """How far the lesson on this topic is done. Marks of tasks that the course no longer has do not count."""
        known = exercises.task_ids(topic) if topic in exercises.topics() else []
        return Standing(len(self.done & set(known)), len(known))


class _Damaged(Exception):
    """The file does not say what such a file says."""


def path() -> str:
    """Where the marks are kept."""
    return os.path.join(course.work(), "progress.json")


def _read() -> Marks:
    """What the file says; nothing, if there is none. Raises _Damaged for a file that somebody else has written."""
    try:
        with open(path(), "rb") as file:
            told = json.load(file)
        done, begun_from = told["done"], told["begun_from"]
        is_ours = isinstance(done, list) and all(isinstance(each, str) for each in [*done, *begun_from.keys(), *begun_from.values()])
    except FileNotFoundError:
        return Marks()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise _Damaged
    return Marks(frozenset(done), begun_from)


@contextmanager
def locked() -> Iterator[None]:
    """No other process of ours changes the learner's folder until the block ends. Raises TimeoutError, an OSError, if one never lets go."""
    # The lock is on a file of its own, because the one with the marks is replaced. It goes with its holder, however that ends.
    handle = os.open(os.path.join(course.work(), ".progress.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        latest = time.monotonic() + _LONGEST_WAIT_SECONDS
        while fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > latest:
                    raise TimeoutError("another process is changing it, and does not come to an end") from None
                time.sleep(0.005)
            except OSError:  # A file system without locks: as on Windows.
                break
        yield
    finally:
        os.close(handle)


def read_to_change() -> Marks:
    """What is kept, for somebody who holds the lock. A damaged file is put aside, and said to be."""
    try:
        return _read()
    except _Damaged:
        aside = course.keep_aside(path(), "damaged")
        print(f"{path()} was damaged, so your progress begins anew. What was in it is in {os.path.basename(aside)}.")
        return Marks()


def keep(marks: Marks) -> None:
    """Keep these from now on, for somebody who holds the lock."""
    told = {
        "about": "Which tasks are done: All Hands writes this file after a right answer.",
        "done": sorted(marks.done),
        "begun_from": marks.begun_from,
    }
    course.write(path(), (json.dumps(told, indent=1) + "\n").encode())


def note(task_id: str) -> Standing | None:
    """A task is done. Returns how far its lesson is; None where nothing is kept, which is everywhere but in the learner's folder.

    Whatever is wrong with that folder, a right answer stays a right answer: it is said in a line, and not raised.
    """
    if not _is_kept_here():
        return None
    try:
        with locked():
            before = read_to_change()
            marks = replace(before, done=before.done | {task_id})
            keep(marks)
    except OSError as error:
        print(
            f"Your answer counts, but it could not be noted in {path()} ({course.reason(error)}). "
            "Look at the file's owner and at the free space, then run this cell again."
        )
        return None
    return marks.standing(task_id.partition(".")[0])


def _is_kept_here() -> bool:
    """Whether this process stands in the learner's folder. Builders, graders and tests of solutions stand elsewhere, and leave no mark."""
    try:
        return os.path.samefile(os.curdir, course.work()) and os.path.isfile(path())
    except OSError:
        return False


# --- what is shown --------------------------------------------------------------------------------------------------

_CELL = "padding:.25em .9em;font-variant-numeric:tabular-nums;white-space:nowrap;border:0;text-align:left;"
_BAR_CELLS = 12


class Progress:
    """How far each lesson is: text, and HTML with links to the learner's own copies."""

    def __init__(self) -> None:
        self.remark = ""
        try:
            marks = _read()
        except _Damaged:
            marks, self.remark = Marks(), f"{path()} is damaged and counts as empty. The next right answer begins it anew."
        except OSError as error:
            marks, self.remark = Marks(), f"{path()} cannot be read ({course.reason(error)})."
        self.standings = {lesson: marks.standing(course.topic_of(lesson)) for lesson in course.lessons()}
        self._begun = {lesson for lesson in self.standings if os.path.isfile(course.at_work(lesson))}
        if not self.standings:
            self.remark = "The course has no lessons yet."
        elif not self._begun:
            self.remark = "Not begun yet: make lab copies the lessons to work/."

    def _told(self, lesson: str) -> str:
        standing = self.standings[lesson]
        return f"{standing.done} of {standing.of}" if lesson in self._begun else "not begun"

    def __repr__(self) -> str:
        width = max((len(course.title_of(lesson)) for lesson in self.standings), default=0)
        lines = [
            f"{course.title_of(lesson).ljust(width)}  {_bar(standing)}  {self._told(lesson)}" for lesson, standing in self.standings.items()
        ]
        return "\n".join([*lines, self.remark]).strip()

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr style="background:none"><td style="{_CELL}">{self._link(lesson)}</td><td style="{_CELL}">{_html_bar(standing)}</td>'
            f'<td style="{_CELL}">{self._told(lesson)}</td></tr>'
            for lesson, standing in self.standings.items()
        )
        table = f'<table style="border-collapse:collapse;margin:.3em 0"><tbody>{rows}</tbody></table>' if rows else ""
        return table + (f"<div>{escape(self.remark)}</div>" if self.remark else "")

    def _link(self, lesson: str) -> str:
        """The lesson's title, as a link to the learner's copy, if there is one. It leads there from the folder of the notebook."""
        title = escape(course.title_of(lesson))
        if lesson not in self._begun:
            return title
        way = os.path.relpath(course.at_work(lesson)).replace(os.sep, "/")
        return f'<a href="{escape(quote(way))}">{title}</a>'


def _bar(standing: Standing) -> str:
    full = _BAR_CELLS * standing.done // max(1, standing.of)
    return "█" * full + "░" * (_BAR_CELLS - full)


def _html_bar(standing: Standing) -> str:
    """Grey, and green as far as the lesson is done: both can be seen on white and on black. The number stands beside it."""
    percent = 100 * standing.done / max(1, standing.of)
    box = "display:inline-block;vertical-align:middle;height:.6em;border-radius:.3em;"
    full = f'<span style="{box}width:{percent:.0f}%;background:{RANKS[2]};vertical-align:top"></span>'
    return f'<span aria-hidden="true" style="{box}width:9em;line-height:0;background:{NEUTRAL}55">{full}</span>'


def progress() -> Progress:
    """How far you are: each lesson, how many of its tasks are done, and a link to it. A right answer in work/ is noted by `check`.

    Raises FileNotFoundError where the course is not.
    """
    return Progress()
