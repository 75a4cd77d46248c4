"""The learner's own copies of the lessons: made once, never written over, begun again when the learner asks for it."""

import glob
import hashlib
import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

import nbformat  # JupyterLab brings it.
from nbformat.sign import NotebookNotary

from allhands import course, marks

_TRUSTED_FOLDERS = ("notebooks", "solutions", "work")


def start_all() -> None:
    """Copy each lesson that is not there yet to work/. What the learner has changed stays; if the course has a newer one, that is said.

    Raises OSError if work/ cannot be written, and FileNotFoundError where the course is not.
    """
    lessons = course.lessons()
    os.makedirs(course.work(), mode=0o700, exist_ok=True)
    copied = []
    with marks.locked():
        kept = marks.read_to_change()
        begun_from = dict(kept.begun_from)
        for lesson in lessons:
            newest = _content(course.pristine(lesson))
            digest = _digest(newest)
            if not os.path.lexists(course.at_work(lesson)):
                course.write(course.at_work(lesson), newest)
                copied.append(lesson)
            # What is there without a note of its beginning counts as begun from today's: it is not known better.
            elif begun_from.get(lesson, digest) != digest:
                yours = _digest_of_learners(lesson)
                if yours not in (begun_from[lesson], digest):
                    print(_newer(lesson))
                    continue
                if yours != digest:
                    course.write(course.at_work(lesson), newest)
            begun_from[lesson] = digest
        marks.keep(replace(kept, begun_from=begun_from))
    if copied:
        print(f"Copied to work/: {', '.join(copied)}")
    root = glob.escape(course.folder())
    _trust(path for name in _TRUSTED_FOLDERS for path in glob.glob(os.path.join(root, name, "*.ipynb")))


def reset(name: str) -> None:
    """Begin a lesson again, none of its tasks done. The learner's file stays beside the new one, under another name.

    `name`: the topic, the number, the whole name or the file. Raises ValueError for a lesson that there is not, OSError if work/ cannot be
    written, and FileNotFoundError where the course is not.
    """
    lesson = course.find(name)
    os.makedirs(course.work(), mode=0o700, exist_ok=True)
    newest = _content(course.pristine(lesson))
    told = [f"{lesson} begins again in work/."]
    with marks.locked():
        kept = marks.read_to_change()
        standing = kept.standing(course.topic_of(lesson))
        if os.path.lexists(course.at_work(lesson)) and _digest_of_learners(lesson) != _digest(newest):
            aside = course.keep_aside(course.at_work(lesson), "old")
            told.append(f"What you had is in {os.path.basename(aside)}.")
        course.write(course.at_work(lesson), newest)
        still_done = {task for task in kept.done if task.partition(".")[0] != course.topic_of(lesson)}
        marks.keep(marks.Marks(frozenset(still_done), kept.begun_from | {lesson: _digest(newest)}))
    if standing.done:
        told.append(f"Its tasks are to be done again ({standing.done} of {standing.of} were done).")
    if len(told) > 1:
        told.append("Is it open in JupyterLab? File, Reload Notebook from Disk.")
    print(" ".join(told))
    _trust([course.at_work(lesson)])


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of_learners(lesson: str) -> str:
    """Of the learner's file; nothing if it cannot be read, so that it is left alone."""
    try:
        return _digest(_content(course.at_work(lesson)))
    except OSError:
        return ""


def _newer(lesson: str) -> str:
    """What to tell a learner whose lesson is older than the course's."""
    # `make lab` runs in a shell that seldom has .venv/bin on its path.
    command = "allhands" if shutil.which("allhands") else os.path.join(os.path.dirname(sys.executable), "allhands")
    return (
        f"The course has a newer {lesson}. Yours stays as it is; `{command} reset {course.topic_of(lesson)}` "
        "begins the new one and keeps yours beside it."
    )


def _trust(paths: Iterable[str]) -> None:
    """Sign notebooks as `jupyter trust` does, without which JupyterLab leaves out the pictures that are stored in them."""
    with closing(NotebookNotary()) as notary:
        for path in paths:
            try:
                notary.sign(nbformat.read(path, as_version=4))
            except Exception:  # A learner's folder may hold anything. What is no notebook needs no signature, and no message.
                continue
