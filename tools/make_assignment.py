"""Make an nbgrader assignment of a lesson: `python tools/make_assignment.py TOPIC`, TOPIC as in 01, or ranks_and_messages.

Lays out a course for nbgrader in build/classroom/: its configuration, and in source/ the lesson with its answers, from solutions/. What
nbgrader releases of it equals the lesson in lessons/. Made again, these two files are written anew, and all others there stay as they are.
"""

import argparse
import os
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from allhands import course
from build_notebooks import without_outputs
from manuscript import RAISES, STUB

CONFIG = f"""\
# Made by tools/make_assignment.py, which writes it anew each time.
c = get_config()
c.CourseDirectory.course_id = "allhands"
c.ClearSolutions.code_stub = {{"python": {STUB!r}}}  # as in the course's own lessons
"""


def as_source(solved: NotebookNode) -> NotebookNode:
    """A lesson with its answers as nbgrader takes it: not yet run, and for students Run All goes on behind a check that fails."""
    notebook = without_outputs(solved)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.metadata["tags"] = [RAISES]
    return notebook


def lay_out(lesson: str, classroom: Path) -> list[Path]:
    """Write the configuration and the lesson with its answers; returns the files. Raises OSError where one cannot be read or written."""
    config, source = classroom / "nbgrader_config.py", classroom / "source" / lesson / f"{lesson}.ipynb"
    notebook = as_source(nbformat.read(Path(course.folder()) / "solutions" / source.name, as_version=4))
    source.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(CONFIG)
    nbformat.write(notebook, source)
    return [config, source]


def what_next(lesson: str, classroom: Path) -> str:
    """The commands with which a teacher goes on. nbgrader calls another program by its name, so its own path would not be enough."""
    programs = os.path.dirname(sys.executable)
    return f"""
Next:
  export PATH="{programs}:$PATH"
  cd {os.path.relpath(classroom)}
  nbgrader generate_assignment {lesson} --force
      makes release/{lesson}/, which you give to your students
  Put what they hand in to submitted/STUDENT/{lesson}/{lesson}.ipynb
  nbgrader autograde {lesson}
      runs their code, so do it where that can do no harm
  nbgrader export
      writes the marks to grades.csv"""


def main() -> None:
    """Make what is asked for, and say what to do with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topic", metavar="TOPIC")
    classroom = Path(course.folder()) / "build" / "classroom"
    try:
        lesson = course.find(parser.parse_args().topic)
        made = lay_out(lesson, classroom)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"no assignment was made: {error}")
    except OSError as error:
        sys.exit(f"no assignment was made: {error.filename} ({error.strerror}). Look at its owner and at the free space, then try again")
    for path in made:
        print("made", os.path.relpath(path))
    print(what_next(lesson, classroom))


if __name__ == "__main__":
    main()
