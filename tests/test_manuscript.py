"""From text to notebooks: quoting, answers, numbers, and an error with file and line for whatever cannot be built."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import build_notebooks  # noqa: E402
import manuscript  # noqa: E402

HEAD = "---\nkernelspec:\n  name: python3\n  display_name: Python 3\n  language: python\n---\n\n"
LIBRARY = '''"""A library."""

import functools


@functools.cache
def double(x):
    """Twice as much.

    In two lines.
    """
    # Why it is so.
    y = x + x

    return y


class Box:
    """Holds."""

    size = 3


def bare(x):
    return x
'''


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Read a text that stands in a course of its own."""
    monkeypatch.setattr(manuscript, "ROOT", tmp_path)
    monkeypatch.setattr(manuscript, "FACTS", tmp_path / "facts.toml")
    (tmp_path / "facts.toml").write_text('[stops]\nvalue = 1419\nwhat = "stops"\nsource = "a paper"\n')
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "library.py").write_text(LIBRARY)

    def read(body, name="reference/01_topic.md"):
        path = tmp_path / "manuscript" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD + body)
        return manuscript.read(path)

    return read


def cell(options="", source=""):
    return "```{code-cell} ipython3\n" + "".join(f":{option}\n" for option in options.split("|") if option) + f"\n{source}\n```\n\n"


def sources(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


# --- quoting ------------------------------------------------------------------------------------------------------


def test_a_function_is_quoted_without_its_decorator(text):
    (source,) = sources(text(cell("quote: package.library:double")))
    assert source == LIBRARY[LIBRARY.index("def double") : LIBRARY.index("\n\n\nclass")]


def test_a_class_is_quoted(text):
    assert sources(text(cell("quote: package.library:Box"))) == ['class Box:\n    """Holds."""\n\n    size = 3']


def test_an_answer_is_the_body_behind_the_docstring(text, monkeypatch):
    monkeypatch.setattr(manuscript, "_check_tasks", lambda *_: None)
    solved = text(cell("answer: package.library:double") + cell("answer: package.library:bare"), "lesson/01_topic.md")
    assert sources(solved) == [
        'def double(x):\n    """Twice as much.\n\n    In two lines.\n    """\n'
        "    ### BEGIN SOLUTION\n    # Why it is so.\n    y = x + x\n\n    return y\n    ### END SOLUTION",
        "def bare(x):\n    ### BEGIN SOLUTION\n    return x\n    ### END SOLUTION",
    ]
    assert sources(manuscript.without_answers(solved)) == [
        'def double(x):\n    """Twice as much.\n\n    In two lines.\n    """\n    raise NotImplementedError',
        "def bare(x):\n    raise NotImplementedError",
    ]
    assert [cell.id for cell in solved.cells] == [cell.id for cell in manuscript.without_answers(solved).cells]


def test_nbgrader_is_told_what_is_an_answer_and_what_a_check(text, monkeypatch):
    monkeypatch.setattr(manuscript, "_check_tasks", lambda *_: None)
    body = cell("answer: package.library:double") + cell("task: {points: 2}", 'check("topic.double", double)')
    answer, check = text(body, "lesson/01_topic.md").cells
    common = {"schema_version": 3, "task": False}
    assert answer.metadata.nbgrader == common | {"grade_id": "topic-double", "solution": True, "grade": False, "locked": False}
    wanted = common | {"grade_id": "check-topic-double", "solution": False, "grade": True, "locked": True, "points": 2}
    assert check.metadata.nbgrader == wanted and "tags" not in check.metadata
    unsolved = manuscript.without_answers(text(body, "lesson/01_topic.md"))
    assert unsolved.cells[1].metadata.tags == ["raises-exception"] and unsolved.cells[1].metadata.nbgrader == wanted


# --- prose --------------------------------------------------------------------------------------------------------


def test_numbers_are_filled_in(text):
    notebook = text("{{ FACTS.stops:,}} stops, {{ FACTS.stops / 2:.1f }}, {{ allhands.launch.MAX_WORLD_SIZE }} ranks\n")
    assert notebook.cells[0].source == "1,419 stops, 709.5, 128 ranks"


def test_each_number_from_elsewhere_has_its_source():
    assert vars(manuscript.facts())


@pytest.mark.parametrize(
    ("body", "line", "told"),
    [
        ("a\n\n```{code-cel} ipython3\n1\n```\n", 10, "there is no directive '```{code-cel} ipython3'"),
        ("a\n\n:::{note}\nb\n:::\n", 10, "there is no directive ':::{note}'"),
        ("a\n\nb {{ FACTS.stopps }}\n", 10, "{{ FACTS.stopps }} cannot be filled in: AttributeError"),
        ("a\n\nb {{ allhands.launch.MAX }}\n", 10, "cannot be filled in: AttributeError"),
        ("a\n\nb {{ FACTS.stops }\n", 10, "braces that do not belong together"),
        ("# A\n\nb\n\n# A\n", 8, "two sections have the heading '# A'"),
        (cell("quot: package.library:double"), 8, "there is no option 'quot': only answer, quote, tags, task"),
        ("a\n\n" + cell("tags: [raises-exceptoin]", "1"), 10, "there is no tag 'raises-exceptoin': only"),
        (cell("quote: package.libary:double"), 8, "there is no module 'package.libary' to quote from"),
        (cell("quote: package.library"), 8, "to quote from: write package.module:name"),
        (cell("", "1") + "a\n\n" + cell("quote: package.library:treble"), 15, "package.library has no function or class 'treble'"),
        (cell("quote: package.library:double", "1"), 8, "a cell with quote has no text of its own"),
        (cell("answer: package.library:double"), 8, "only lessons have answers and tasks"),
        (cell(), 8, "an empty cell"),
    ],
)
def test_what_cannot_be_built_is_an_error_with_its_line(text, body, line, told):
    with pytest.raises(manuscript.ManuscriptError) as caught:
        text(body)
    assert str(caught.value).startswith(f"manuscript/reference/01_topic.md, line {line}: ")
    assert told in str(caught.value)


ANSWERS = [
    cell(f"answer: allhands.parallel.messages:{name}") for name in ("deliver", "largest", "shift", "root_barrier", "deliver_any_shape")
]
CHECKS = [
    cell("task: {points: 1}", f'check("ranks_and_messages.{name}", {name})')
    for name in ("deliver", "largest", "shift", "root_barrier", "deliver_any_shape")
]
PREDICTION = cell("answer: allhands.exercises.ranks_and_messages.predict:predict") + cell(
    "task: {points: 1}", 'check("ranks_and_messages.predict", predict)'
)
PAIRS = [answer + check for answer, check in zip(ANSWERS, CHECKS, strict=True)]


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (
            [PREDICTION, *PAIRS[:-1]],
            "the tasks are predict, deliver, largest, shift, root_barrier, but allhands/exercises/ranks_and_messages has",
        ),
        ([PREDICTION, PAIRS[1], PAIRS[0], *PAIRS[2:]], "the tasks are predict, largest, deliver"),
        ([PREDICTION, CHECKS[0] + ANSWERS[0], *PAIRS[1:]], "the cell with the answer deliver has to come before its check"),
        ([PREDICTION.replace("points: 1", "points: 0")], "a task says what it is worth"),
        ([PREDICTION.replace("points: 1", "point: 1")], "a task says what it is worth"),
        ([PREDICTION.replace('predict", predict)', 'predict", guess)')], 'a task is one line: check("ranks_and_messages.NAME", NAME)'),
    ],
)
def test_a_lesson_has_every_task_of_its_topic(text, monkeypatch, cells, told):
    monkeypatch.setattr(manuscript, "_quoted", lambda _text, _line, address: (f"def {address.partition(':')[2]}(x):\n    return x", 0))
    text(PREDICTION + "".join(PAIRS), "lesson/01_ranks_and_messages.md")
    with pytest.raises(manuscript.ManuscriptError) as caught:
        text("".join(cells), "lesson/01_ranks_and_messages.md")
    assert told in str(caught.value)


# --- the same every time ------------------------------------------------------------------------------------------


def test_ids_do_not_change_when_something_else_does(text):
    body = "# One\n\na\n\n" + cell("", "1") + "# Two\n\nb\n\n" + cell("", "2")
    before = text(body)
    after = text(body.replace("a\n\n", "a\n\n" + cell("", "0"), 1))
    assert len({cell.id for cell in before.cells}) == len(before.cells) == 4
    assert [cell.id for cell in after.cells[-2:]] == [cell.id for cell in before.cells[-2:]]
    assert after.cells[0].id == before.cells[0].id


def test_two_builds_are_equal(text, tmp_path):
    body = "# One\n\n" + cell("", "print(1)\nprint(2)") + cell("tags: [raises-exception]", "1 / 0") + cell("", "3")
    built = []
    for _ in range(2):
        notebook = text(body)
        build_notebooks.execute(notebook, tmp_path)
        built.append(nbformat.writes(notebook))
    assert built[0] == built[1]
    assert [cell.execution_count for cell in nbformat.reads(built[0], as_version=4).cells[1:]] == [1, 2, 3]


def test_no_text_of_an_answer_reaches_the_lessons():
    for path in sorted((ROOT / "solutions").glob("*.ipynb")):
        solved, unsolved = (nbformat.read(ROOT / folder / path.name, as_version=4) for folder in ("solutions", "lessons"))
        found = 0
        given = {line.strip() for cell in unsolved.cells if "nbgrader" not in cell.metadata for line in cell.source.splitlines()}
        whole = (ROOT / "lessons" / path.name).read_text()
        for cell in solved.cells:
            for answer in re.findall(r"### BEGIN SOLUTION\n(.*?)\n\s*### END SOLUTION", cell.source, re.DOTALL):
                lines = [line.strip() for line in answer.splitlines()]
                told = [line for line in lines if line and line not in given and line not in ("else:", "return x", "return received")]
                assert told
                for line in told:
                    assert line.replace('"', '\\"') not in whole, line
                found += 1
        assert found >= 3
        assert "SOLUTION" not in whole


# --- what is stale ------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    """The course, to change."""
    for part in ("tools", "manuscript", "notebooks", "solutions", "lessons", "allhands"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    return tmp_path


def check(folder):
    return subprocess.run([sys.executable, folder / "tools" / "build_notebooks.py", "--check"], capture_output=True, text=True)


def change(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    ("file", "before", "after", "stale"),
    [
        ("allhands/parallel/messages.py", "token += x", "token -= x", ["notebooks/01_ranks_and_messages"]),
        ("allhands/parallel/messages.py", "return received", "return  received", ["solutions/01_ranks_and_messages"]),
        ("allhands/parallel/messages.py", "all report to rank 0", "all tell rank 0", ["solutions/01_ranks", "lessons/01_ranks"]),
        ("manuscript/facts.toml", "419", "420", ["notebooks/01_ranks_and_messages"]),
        ("manuscript/reference/start_here.md", "torch.ones(2)", "torch.ones(3)", ["notebooks/start_here"]),
        ("lessons/01_ranks_and_messages.ipynb", "Six tasks", "Five tasks", ["lessons/01_ranks_and_messages"]),
    ],
)
def test_a_change_is_noticed_where_it_matters(copy, file, before, after, stale):
    change(copy / file, before, after)
    done = check(copy)
    told = done.stderr.splitlines()
    assert done.returncode == 1 and len(told) == len(stale), done.stderr
    for line, name in zip(told, stale, strict=True):
        assert line.startswith(name) and line.endswith("is not what the manuscript says: run make notebooks")


def test_a_notebook_without_a_text_is_noticed(copy):
    (copy / "manuscript" / "reference" / "start_here.md").unlink()
    assert check(copy).stderr == "notebooks/start_here.ipynb is not what the manuscript says: run make notebooks\n"


def test_an_error_in_a_text_is_told_in_a_line(copy):
    change(copy / "manuscript" / "lesson" / "01_ranks_and_messages.md", "messages:largest", "messages:largets")
    done = check(copy)
    assert re.fullmatch(
        r"manuscript/lesson/01_ranks_and_messages.md, line \d+: allhands.parallel.messages has no function or class 'largets' to quote\n",
        done.stderr,
    )


def test_a_name_without_a_text_is_refused():
    done = subprocess.run([sys.executable, ROOT / "tools" / "build_notebooks.py", "01_rank"], capture_output=True, text=True)
    assert done.returncode == 1 and "there is no text 01_rank. There are 01_ranks_and_messages, start_here" in done.stderr
