"""A lesson as an nbgrader assignment: what students get has no answers, and they get the marks that they deserve."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbgrader.api import Gradebook

ROOT = Path(__file__).resolve().parent.parent
LESSON = "01_ranks_and_messages"
POINTS = {
    "check-ranks-and-messages-predict": 1,
    "check-ranks-and-messages-deliver": 2,
    "check-ranks-and-messages-largest": 2,
    "check-ranks-and-messages-shift": 2,
    "check-ranks-and-messages-root-barrier": 2,
    "check-ranks-and-messages-deliver-any-shape": 3,
}
BROKEN = {
    "ranks-and-messages-largest": ("torch.maximum", "torch.minimum"),
    "ranks-and-messages-root-barrier": ("dist.send(token, peer)", "pass"),  # All others wait forever.
}


def read(path):
    return nbformat.read(path, as_version=4)


def lesson_in(folder):
    return folder / LESSON / f"{LESSON}.ipynb"


def answers():
    """The answer cells of the solution, by their grade_id."""
    cells = read(ROOT / "solutions" / f"{LESSON}.ipynb").cells
    return {cell.metadata.nbgrader.grade_id: cell.source for cell in cells if cell.metadata.get("nbgrader", {}).get("solution")}


def make_assignment(folder, topic):
    """Run the tool on a course that is elsewhere, so that nothing of a teacher's own build/ is touched."""
    command = [sys.executable, ROOT / "tools" / "make_assignment.py", topic]
    environment = os.environ | {"ALLHANDS_COURSE": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def programs():
    """nbgrader calls alembic by its name, so where a teacher has followed the tool's advice it is on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
        yield


def nbgrader(classroom, *arguments):
    done = subprocess.run([sys.executable, "-m", "nbgrader", *arguments], cwd=classroom, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def hand_in(classroom, student, change):
    """What a student makes of the release, which is all that they have got."""
    notebook = read(lesson_in(classroom / "release"))
    for cell in notebook.cells:
        if "nbgrader" in cell.metadata:
            change(cell, cell.metadata.nbgrader)
    path = lesson_in(classroom / "submitted" / student)
    path.parent.mkdir(parents=True)
    nbformat.write(notebook, path)


def solve(cell, about):
    cell.source = answers().get(about.grade_id, cell.source)


def solve_in_part(cell, about):
    if about.grade_id != "ranks-and-messages-deliver-any-shape":
        solve(cell, about)
    if about.grade_id in BROKEN:
        before = cell.source
        cell.source = before.replace(*BROKEN[about.grade_id])
        assert cell.source != before


def leave(cell, about):
    pass


def cheat(cell, about):
    if about.grade:
        cell.source, cell.metadata.tags, about.points = "print('right')", [], 99


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course")
    for name in ("lessons", "solutions"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def classroom(course, programs):
    """An nbgrader course with a release."""
    done = make_assignment(course, "ranks_and_messages")
    assert done.returncode == 0, done.stderr
    nbgrader(course / "build" / "classroom", "generate_assignment", LESSON)
    return course / "build" / "classroom"


@pytest.fixture(scope="module")
def marks(classroom):
    """Student -> check -> points, after one run of nbgrader over all of them."""
    for student, change in {"solved": solve, "unsolved": leave, "wrong": solve_in_part, "cheat": cheat}.items():
        hand_in(classroom, student, change)
    nbgrader(classroom, "autograde", LESSON)
    return {student: graded(classroom, student) for student in ("solved", "unsolved", "wrong", "cheat")}


def graded(classroom, student):
    with Gradebook(f"sqlite:///{classroom / 'gradebook.db'}", "allhands") as gradebook:
        grades = gradebook.find_submission_notebook(LESSON, LESSON, student).grades
        assert not any(grade.needs_manual_grade for grade in grades)
        return {grade.name: grade.score for grade in grades}


@pytest.mark.parametrize(
    ("student", "lost"),
    [
        ("solved", set()),
        ("unsolved", set(POINTS)),
        ("wrong", {f"check-ranks-and-messages-{name}" for name in ("largest", "root-barrier", "deliver-any-shape")}),
        ("cheat", set(POINTS)),
    ],
)
def test_each_check_gives_its_points_for_a_right_answer_and_none_for_another(marks, student, lost):
    assert marks[student] == {check: 0 if check in lost else points for check, points in POINTS.items()}


def test_a_check_that_a_student_has_changed_is_put_back(marks, classroom):
    def checks(folder):
        return {c.metadata.nbgrader.grade_id: c for c in read(lesson_in(folder)).cells if c.metadata.get("nbgrader", {}).get("grade")}

    ours, theirs = checks(classroom / "source"), checks(classroom / "autograded" / "cheat")
    assert [cell.source for cell in theirs.values()] == [cell.source for cell in ours.values()]
    assert {name: cell.metadata.nbgrader.points for name, cell in theirs.items()} == POINTS


def test_the_release_is_the_lesson(classroom):
    def said(path):
        for cell in read(path).cells:
            about = {key: value for key, value in cell.metadata.get("nbgrader", {}).items() if key not in ("checksum", "cell_type")}
            yield cell.id, cell.cell_type, cell.source, cell.metadata.get("tags", []), about

    assert list(said(lesson_in(classroom / "release"))) == list(said(ROOT / "lessons" / f"{LESSON}.ipynb"))


def test_no_answer_is_in_the_release(classroom):
    text = lesson_in(classroom / "release").read_text()
    bodies = [re.search(r"### BEGIN SOLUTION\n(.*)\n +### END SOLUTION", source, re.DOTALL)[1] for source in answers().values()]
    assert len(bodies) == len(POINTS)
    for body in bodies:
        assert json.dumps(body.splitlines()[-1].strip())[1:-1] in lesson_in(classroom / "source").read_text()
        assert not any(body in cell.source for cell in read(lesson_in(classroom / "release")).cells)
    assert "SOLUTION" not in text
    assert not any(cell.get("outputs") for cell in read(lesson_in(classroom / "release")).cells)


@pytest.mark.parametrize("topic", ["01", LESSON])
def test_made_again_it_leaves_alone_what_is_not_its_own(classroom, topic):
    kept = classroom / "source" / LESSON / "notes.txt"
    kept.write_text("mine")
    before = {path: path.read_bytes() for path in classroom.rglob("*") if path.is_file()}
    lesson_in(classroom / "source").write_text("spoilt")
    done = make_assignment(classroom.parent.parent, topic)
    assert done.returncode == 0, done.stderr
    assert f"made build/classroom/source/{LESSON}/{LESSON}.ipynb\n" in done.stdout
    assert f"generate_assignment {LESSON} --force" in done.stdout and f"autograde {LESSON}" in done.stdout
    assert {path: path.read_bytes() for path in classroom.rglob("*") if path.is_file()} == before
    kept.unlink()


def test_a_lesson_that_there_is_not_says_which_there_are(course):
    done = make_assignment(course, "ranks_and_mesages")
    assert done.returncode == 1
    assert done.stderr == "no assignment was made: there is no lesson 'ranks_and_mesages'. Is it one of these? ranks_and_messages\n"
