"""The learner's copies of the lessons, and which tasks are done: nothing of theirs is lost, and nothing breaks a right answer."""

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from nbformat.sign import NotebookNotary

from allhands import course, exercises, lessons, marks, progress
from allhands.command import main

LESSON = "01_ranks_and_messages"
TOPIC = "ranks_and_messages"
TASKS = exercises.task_ids(TOPIC)
OTHER = "02_two_by_two"


def notebook(words):
    """A lesson that says these words, with a picture that is stored in it."""
    picture = nbformat.v4.new_output("display_data", {"text/html": f"<svg role='img'><title>{words}</title></svg>"})
    cells = [nbformat.v4.new_code_cell("draw(job)", id="a", execution_count=1, outputs=[picture])]
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells)).encode()


def make_course(folder, **texts):
    (folder / "lessons").mkdir(parents=True, exist_ok=True)
    for lesson in (LESSON, OTHER):
        (folder / "lessons" / f"{lesson}.ipynb").write_bytes(notebook(texts.get(lesson, "first")))


@contextmanager
def standing_in(folder):
    """The course is there, and so is Jupyter's signature store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLHANDS_COURSE", str(folder))
        patch.setenv("JUPYTER_DATA_DIR", str(folder / "jupyter"))
        patch.chdir(folder)
        yield patch


@pytest.fixture
def here(tmp_path):
    """A course with two lessons, of which nothing was begun."""
    make_course(tmp_path)
    with standing_in(tmp_path):
        yield tmp_path


@pytest.fixture
def begun(here, capsys, monkeypatch):
    """The same, begun, and the kernel of a notebook in work/."""
    lessons.start_all()
    capsys.readouterr()
    monkeypatch.chdir(here / "work")
    return here


def mine(folder, lesson=LESSON):
    return folder / "work" / f"{lesson}.ipynb"


def said(capsys):
    return capsys.readouterr().out


def change_course(folder, words="second"):
    (folder / "lessons" / f"{LESSON}.ipynb").write_bytes(notebook(words))


def kept(folder):
    return json.loads((folder / "work" / "progress.json").read_text())


# --- copying ------------------------------------------------------------------------------------------------------


def test_the_lessons_are_copied_once(here, capsys):
    lessons.start_all()
    assert said(capsys) == f"Copied to work/: {LESSON}, {OTHER}\n"
    assert mine(here).read_bytes() == notebook("first")
    lessons.start_all()
    assert said(capsys) == ""


def test_files_are_private_to_the_user(here):
    lessons.start_all()
    mine(here).write_text("mine")
    lessons.reset(TOPIC)
    assert stat.S_IMODE((here / "work").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (here / "work").iterdir()}
    assert modes == dict.fromkeys([".progress.lock", "progress.json", f"{LESSON}.ipynb", f"{LESSON}.old-1.ipynb", f"{OTHER}.ipynb"], 0o600)


def test_a_learners_file_is_never_written_over(begun, capsys):
    mine(begun).write_text("mine")
    lessons.start_all()
    assert mine(begun).read_text() == "mine" and said(capsys) == ""


def test_a_file_that_was_there_before_the_first_start_is_the_learners(here, capsys):
    mine(here).parent.mkdir()
    mine(here).write_text("mine")
    lessons.start_all()
    assert mine(here).read_text() == "mine" and said(capsys) == f"Copied to work/: {OTHER}\n"
    change_course(here)
    lessons.start_all()
    assert mine(here).read_text() == "mine" and "The course has a newer" in said(capsys)


def test_a_newer_lesson_is_told_of_and_what_was_changed_stays(begun, capsys):
    mine(begun).write_text("mine")
    change_course(begun)
    for _ in range(2):
        lessons.start_all()
        line = said(capsys)
        assert re.fullmatch(
            f"The course has a newer {LESSON}. Yours stays as it is; "
            f"`.*allhands reset {TOPIC}` begins the new one and keeps yours beside it.\n",
            line,
        )
        assert mine(begun).read_text() == "mine"
    lessons.reset(TOPIC)
    said(capsys)
    lessons.start_all()
    assert said(capsys) == "" and mine(begun).read_bytes() == notebook("second")


def test_the_command_that_is_told_is_one_that_runs(begun, capsys, monkeypatch):
    mine(begun).write_text("mine")
    change_course(begun)
    monkeypatch.setenv("PATH", "/nowhere")
    lessons.start_all()
    assert f"`{os.path.dirname(sys.executable)}/allhands reset {TOPIC}`" in said(capsys)


def test_a_lesson_that_was_not_touched_is_brought_up_to_date(begun, capsys):
    change_course(begun)
    lessons.start_all()
    assert said(capsys) == "" and mine(begun).read_bytes() == notebook("second")


def test_a_lesson_that_somebody_else_brought_up_to_date(begun, capsys):
    change_course(begun)
    mine(begun).write_bytes(notebook("second"))
    lessons.start_all()
    mine(begun).write_text("mine")
    lessons.start_all()
    assert said(capsys) == ""


def test_a_lesson_that_was_thrown_away_comes_again(begun, capsys):
    mine(begun).unlink()
    lessons.start_all()
    assert said(capsys) == f"Copied to work/: {LESSON}\n"


def test_a_full_disk_leaves_nothing_half_written(here, monkeypatch, capsys):
    def refuse(*names):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        assert main(["start"]) == 1
    assert capsys.readouterr().err == "allhands: No space left on device\n"
    assert os.listdir(here / "work") == [".progress.lock"]
    lessons.start_all()
    mine(here).write_text("mine")
    before = sorted(os.listdir(here / "work"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        assert main(["reset", TOPIC]) == 1
    assert sorted(os.listdir(here / "work")) == before and mine(here).read_text() == "mine"


def test_something_else_in_the_way_does_not_hinder_the_other_lessons(here):
    mine(here).mkdir(parents=True)
    lessons.start_all()
    change_course(here)
    lessons.start_all()
    assert mine(here).is_dir() and mine(here, OTHER).is_file()


# --- trust --------------------------------------------------------------------------------------------------------


def is_trusted(path):
    with closing(NotebookNotary()) as notary:
        return notary.check_signature(nbformat.read(path, as_version=4))


def test_copies_are_trusted_and_so_are_the_notebooks_of_the_course(here):
    """Else JupyterLab would leave out the pictures that are stored in them. A broken notebook does not hinder it."""
    (here / "notebooks").mkdir()
    (here / "notebooks" / "start.ipynb").write_bytes(notebook("start"))
    lessons.start_all()
    assert is_trusted(mine(here)) and is_trusted(here / "notebooks" / "start.ipynb")
    (here / "work" / "00.ipynb").write_text("{")
    (here / "work" / "000.ipynb").write_text("[]")
    (here / "work" / "zz.ipynb").write_bytes(notebook("changed elsewhere"))
    assert not is_trusted(here / "work" / "zz.ipynb")
    lessons.start_all()
    assert is_trusted(here / "work" / "zz.ipynb")


def test_a_lesson_that_begins_again_is_trusted(begun):
    change_course(begun)
    assert not is_trusted(begun / "lessons" / f"{LESSON}.ipynb")
    lessons.reset(TOPIC)
    assert is_trusted(mine(begun)) and is_trusted(begun / "lessons" / f"{LESSON}.ipynb")  # By what is in it, not by its name.


# --- beginning again ----------------------------------------------------------------------------------------------


def test_reset_keeps_what_was_there_under_another_name_each_time(begun, capsys):
    for number, words in enumerate(("first try", "second try"), start=1):
        mine(begun).write_text(words)
        lessons.reset(TOPIC)
        assert said(capsys) == (
            f"{LESSON} begins again in work/. What you had is in {LESSON}.old-{number}.ipynb. "
            "Is it open in JupyterLab? File, Reload Notebook from Disk.\n"
        )
    assert mine(begun).read_bytes() == notebook("first")
    assert [(begun / "work" / f"{LESSON}.old-{number}.ipynb").read_text() for number in (1, 2)] == ["first try", "second try"]


def test_reset_clears_the_marks_of_its_lesson_alone(begun, capsys):
    marks.note(TASKS[0])
    marks.note(TASKS[1])
    with marks.locked():
        before = marks.read_to_change()
        marks.keep(marks.Marks(before.done | {f"{OTHER[3:]}.task"}, before.begun_from))
    lessons.reset(TOPIC)
    assert "Its tasks are to be done again (2 of 6 were done)." in said(capsys)
    assert kept(begun)["done"] == [f"{OTHER[3:]}.task"]


def test_reset_of_what_was_not_begun_or_not_changed_only_copies(here, capsys):
    for _ in range(2):
        lessons.reset(TOPIC)
        assert said(capsys) == f"{LESSON} begins again in work/.\n"
    assert {*os.listdir(here / "work")} == {".progress.lock", f"{LESSON}.ipynb", "progress.json"}
    lessons.start_all()
    assert said(capsys) == f"Copied to work/: {OTHER}\n"


@pytest.mark.parametrize("name", [TOPIC, LESSON, "01", "1", f"{LESSON}.ipynb", f"work/{LESSON}.ipynb"])
def test_a_lesson_has_several_names(here, name):
    assert course.find(name) == LESSON


@pytest.mark.parametrize("name", ["rank_and_mesages", "01_rank_messages", f"{TOPIC}.shift"])
def test_an_unknown_lesson_is_told_the_nearest(here, name, capsys):
    assert main(["reset", name]) == 2
    assert capsys.readouterr().err == f"allhands: there is no lesson {name!r}. Is it one of these? {TOPIC}\n"
    assert not (here / "work").exists()


@pytest.mark.parametrize("name", ["", "9", "zebra", "../../etc/passwd"])
def test_what_is_like_no_lesson_is_told_all(here, name, capsys):
    assert main(["reset", name]) == 2
    assert capsys.readouterr().err == f"allhands: there is no lesson {name!r}. Is it one of these? {TOPIC}, two_by_two\n"


# --- the command --------------------------------------------------------------------------------------------------


def command(*arguments, **environment):
    return subprocess.run([sys.executable, "-m", "allhands", *arguments], capture_output=True, text=True, env=os.environ | environment)


def test_the_command(here):
    done = command("start")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"Copied to work/: {LESSON}, {OTHER}\n", "")
    done = command("reset", "01")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{LESSON} begins again in work/.\n", "")
    assert command().stdout.startswith("usage: allhands")
    assert command("rest").returncode == 2


def test_a_package_without_its_course_says_so(here, tmp_path):
    done = command("start", ALLHANDS_COURSE=str(tmp_path / "elsewhere"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"there are no lessons in {tmp_path}/elsewhere: the package allhands was installed without its course" in done.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_made_says_so(here):
    (here / "work").write_text("a file")
    done = command("start")
    assert done.returncode == 1 and done.stderr == f"allhands: {here}/work: File exists\n"


def test_the_course_is_where_the_package_is(monkeypatch):
    monkeypatch.delenv("ALLHANDS_COURSE", raising=False)
    assert Path(course.folder()) == Path(__file__).resolve().parent.parent


# --- which tasks are done -----------------------------------------------------------------------------------------


def test_a_right_answer_is_noted(begun):
    assert str(marks.note(TASKS[3])) == "1 of 6 in this lesson"
    assert str(marks.note(TASKS[0])) == "2 of 6 in this lesson"
    assert str(marks.note(TASKS[3])) == "2 of 6 in this lesson"
    lessons.start_all()
    assert kept(begun)["done"] == sorted([TASKS[0], TASKS[3]])


def test_nothing_is_kept_elsewhere(begun, monkeypatch, capsys):
    for folder in ("lessons", "solutions/work", "."):
        (begun / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(begun / folder)
        assert marks.note(TASKS[0]) is None
    monkeypatch.chdir(begun / "work")
    (begun / "work" / "progress.json").unlink()
    assert marks.note(TASKS[0]) is None and not (begun / "work" / "progress.json").exists()
    assert said(capsys) == ""


def test_a_task_that_the_course_no_longer_has_does_not_count(begun):
    marks.note(TASKS[0])
    assert str(marks.note(f"{TOPIC}.gone")) == "1 of 6 in this lesson"


def refuse(*names, **options):
    raise OSError(30, "Read-only file system")


@pytest.mark.parametrize(("name", "of"), [("replace", "os"), ("mkstemp", "tempfile"), ("open", "os")])
def test_a_folder_that_cannot_be_written_breaks_no_right_answer(begun, monkeypatch, capsys, name, of):
    marks.note(TASKS[0])
    with monkeypatch.context() as patch:
        patch.setattr({"os": os, "tempfile": tempfile}[of], name, refuse)
        assert marks.note(TASKS[1]) is None
    line = said(capsys)
    assert line.startswith("Your answer counts, but it could not be noted in ") and "(Read-only file system). Look at" in line
    assert str(marks.note(TASKS[2])) == "2 of 6 in this lesson"


def test_somebody_who_does_not_let_go_breaks_no_right_answer(begun, monkeypatch, capsys):
    monkeypatch.setattr(marks, "_LONGEST_WAIT_SECONDS", 0.05)
    with marks.locked():
        assert marks.note(TASKS[0]) is None
    assert "(another process is changing it, and does not come to an end)" in said(capsys)


def test_a_file_system_without_locks(begun, monkeypatch):
    def refuse(handle, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(marks.fcntl, "flock", refuse)
    assert str(marks.note(TASKS[0])) == "1 of 6 in this lesson"
    monkeypatch.setattr(marks, "fcntl", None)
    assert str(marks.note(TASKS[1])) == "2 of 6 in this lesson"


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"{}",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"done": "abc", "begun_from": {}}',
    b'{"done": [1], "begun_from": {}}',
]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:12]))
def test_a_damaged_file_is_put_aside(begun, capsys, content):
    file = begun / "work" / "progress.json"
    for number in (1, 2):
        file.write_bytes(content)
        assert "is damaged and counts as empty" in repr(progress())
        assert str(marks.note(TASKS[0])) == "1 of 6 in this lesson"
        assert said(capsys) == f"{file} was damaged, so your progress begins anew. What was in it is in progress.damaged-{number}.json.\n"
        assert (begun / "work" / f"progress.damaged-{number}.json").read_bytes() == content


def test_after_damage_the_learners_lessons_are_still_theirs(begun, capsys):
    mine(begun).write_text("mine")
    (begun / "work" / "progress.json").write_text("?")
    lessons.start_all()
    assert "was damaged" in said(capsys) and mine(begun).read_text() == "mine"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["done", "begun_from", "x"]) | st.text(), inner, max_size=3)
    ),
)
written_by_hand = st.binary() | anything.map(lambda told: json.dumps(told).encode())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(written_by_hand)
def test_whatever_is_in_the_file_a_right_answer_is_noted(begun, content):
    (begun / "work" / "progress.json").write_bytes(content)
    progress()._repr_html_()
    assert marks.note(TASKS[0]).done >= 1
    assert TASKS[0] in kept(begun)["done"]


NOTER = "import sys; from allhands.marks import note\nprint(flush=True); input()\nfor task in sys.argv[1:]: note(task)"


def test_who_comes_between_reading_and_writing_waits(begun, monkeypatch):
    keep = marks.keep

    def keep_slowly(told):
        time.sleep(0.02)
        keep(told)

    monkeypatch.setattr(marks, "keep", keep_slowly)
    with ThreadPoolExecutor() as pool:
        list(pool.map(marks.note, TASKS))
    assert kept(begun)["done"] == sorted(TASKS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=5)
@given(st.lists(st.sampled_from(TASKS), min_size=1, max_size=30), st.lists(st.sampled_from(TASKS), min_size=1, max_size=30))
def test_two_notebooks_at_once_lose_no_entry(begun, one, other):
    (begun / "work" / "progress.json").write_text('{"done": [], "begun_from": {}}')
    command = [sys.executable, "-c", NOTER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *one], **pipes) as first, subprocess.Popen([*command, *other], **pipes) as second:
        for process in (first, second):
            process.stdout.readline()  # It has imported what it needs.
        for process in (first, second):
            process.stdin.write("\n")
            process.stdin.flush()
    assert (first.returncode, second.returncode) == (0, 0)
    assert kept(begun)["done"] == sorted({*one, *other})


# --- nothing of the learner's is lost -----------------------------------------------------------------------------


class Learner(RuleBasedStateMachine):
    """Starts, resets, edits and updates of the course in any order: each text of the learner's that was reset is somewhere in work/."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        make_course(self.folder)
        self.stand = standing_in(self.folder)
        patch = self.stand.__enter__()
        patch.setattr(lessons, "_trust", lambda paths: None)  # Slow, and tested above.
        self.texts = set()
        self.edited = None
        self.done = set()
        self.edits = 0

    def teardown(self):
        self.stand.__exit__(None, None, None)

    @rule()
    def start(self):
        lessons.start_all()

    @rule()
    def reset(self):
        lessons.reset(TOPIC)
        if self.edited:
            self.texts.add(self.edited)
        self.edited = None
        self.done.clear()

    @rule()
    @precondition(lambda self: mine(self.folder).exists())
    def edit(self):
        self.edits += 1
        self.edited = f"edit {self.edits}"
        mine(self.folder).write_text(self.edited)

    @rule(words=st.sampled_from(["first", "second", "third"]))
    def update(self, words):
        change_course(self.folder, words)

    @rule(task=st.sampled_from(TASKS))
    @precondition(lambda self: mine(self.folder).exists())
    def answer(self, task):
        os.chdir(self.folder / "work")
        self.done.add(task)
        assert marks.note(task).done == len(self.done)

    @invariant()
    def nothing_is_lost(self):
        if mine(self.folder).exists():
            there = {path.read_text() for path in (self.folder / "work").glob("*.ipynb")}
            assert self.texts <= there
            assert self.edited is None or mine(self.folder).read_text() == self.edited


Learner.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestALearner = Learner.TestCase


# --- what is shown ------------------------------------------------------------------------------------------------


def test_progress_before_anything_was_begun(here):
    assert repr(progress()) == (
        "01 Ranks and messages  ░░░░░░░░░░░░  not begun\n"
        "02 Two by two          ░░░░░░░░░░░░  not begun\n"
        "Not begun yet: make lab copies the lessons to work/."
    )
    assert "<a " not in progress()._repr_html_() and "make lab copies" in progress()._repr_html_()
    assert not (here / "work").exists()


@pytest.mark.parametrize(("folder", "way"), [("notebooks", "../work/"), ("work", ""), (".", "work/")])
def test_progress_leads_to_the_lessons_from_any_folder(begun, monkeypatch, folder, way):
    marks.note(TASKS[0])
    (begun / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(begun / folder)
    shown = progress()
    assert repr(shown).splitlines()[0] == "01 Ranks and messages  ██░░░░░░░░░░  1 of 6"
    assert f'<a href="{way}{LESSON}.ipynb">01 Ranks and messages</a>' in shown._repr_html_()
    assert "width:17%" in shown._repr_html_() and "1 of 6" in shown._repr_html_()


def test_progress_of_a_course_without_lessons(here):
    for path in (here / "lessons").iterdir():
        path.unlink()
    assert repr(progress()) == "The course has no lessons yet."
    lessons.start_all()


def test_progress_that_cannot_be_read(begun):
    (begun / "work" / "progress.json").unlink()
    (begun / "work" / "progress.json").mkdir()
    assert repr(progress()).endswith("progress.json cannot be read (Is a directory).")
    assert marks.note(TASKS[0]) is None


def test_progress_without_a_course(here, monkeypatch):
    monkeypatch.setenv("ALLHANDS_COURSE", "/nowhere")
    with pytest.raises(FileNotFoundError, match="installed without its course"):
        progress()
