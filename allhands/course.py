"""Where the course is, which lessons it has, and how a file of the learner's is written: whole or not at all, and for nobody else."""

import difflib
import os
import re
import tempfile
from contextlib import suppress
from itertools import count

from allhands.errors import first_letter_up, without_traceback


def folder() -> str:
    """The folder in which this package lies; or the one that ALLHANDS_COURSE names, with which tests leave a learner's own files alone."""
    return os.path.abspath(os.environ.get("ALLHANDS_COURSE") or os.path.dirname(os.path.dirname(__file__)))


def pristine(lesson: str) -> str:
    """The path of a lesson as it comes with the course."""
    return os.path.join(folder(), "lessons", f"{lesson}.ipynb")


def at_work(lesson: str) -> str:
    """The path of a lesson as the learner changes it."""
    return os.path.join(work(), f"{lesson}.ipynb")


def work() -> str:
    """The folder in which the learner works."""
    return os.path.join(folder(), "work")


def lessons() -> list[str]:
    """The lessons, in their order: `01_ranks_and_messages`. Raises FileNotFoundError where the course has no folder of them."""
    try:
        names = os.listdir(os.path.join(folder(), "lessons"))
    except OSError:
        raise without_traceback(
            FileNotFoundError(
                f"there are no lessons in {folder()}: the package allhands was installed without its course. "
                "Get the whole course, with its Makefile, and run make lab there"
            )
        ) from None
    return sorted(name.removesuffix(".ipynb") for name in names if name.endswith(".ipynb") and not name.startswith("."))


def topic_of(lesson: str) -> str:
    """What a lesson is about, without its number: `ranks_and_messages`. Its tasks are named by it."""
    return re.sub(r"^\d+_", "", lesson)


def title_of(lesson: str) -> str:
    """A lesson's name as a reader likes it: `01 Ranks and messages`."""
    number = lesson.removesuffix(topic_of(lesson)).rstrip("_")
    return f"{number} {first_letter_up(topic_of(lesson).replace('_', ' '))}".strip()


def find(name: str) -> str:
    """The lesson that has this topic, number, whole name or file. Raises ValueError, with the nearest, for one that there is not."""
    asked = os.path.basename(name).removesuffix(".ipynb")
    known = lessons()
    for lesson in known:
        number = lesson.partition("_")[0]
        if asked in (lesson, topic_of(lesson), number) or (asked.isdecimal() and number.lstrip("0") == asked):
            return lesson
    if not known:
        raise without_traceback(ValueError(f"there is no lesson {name!r}: the course has none yet"))
    topics = [topic_of(lesson) for lesson in known]
    near = difflib.get_close_matches(topic_of(asked), topics, n=3, cutoff=0.3) or topics
    raise without_traceback(ValueError(f"there is no lesson {name!r}. Is it one of these? {', '.join(near)}"))


def write(path: str, content: bytes) -> None:
    """Write a file of the learner's: whole or not at all, and such that no other user can read it."""
    handle, beside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=f".{os.path.basename(path)}.")  # Its mode is 600.
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def keep_aside(path: str, word: str) -> str:
    """Copy a file beside itself under a name that is free, such as `01_topic.old-1.ipynb` for the word `old`. Returns that path."""
    stem, suffix = os.path.splitext(path)
    aside = next(name for number in count(1) if not os.path.lexists(name := f"{stem}.{word}-{number}{suffix}"))
    with open(path, "rb") as file:
        write(aside, file.read())
    return aside


def reason(error: OSError) -> str:
    """Why the system refused, in its own words."""
    return error.strerror or str(error)
