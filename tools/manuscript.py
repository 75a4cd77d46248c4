"""The manuscript: how its texts become notebooks that have not run yet.

A text is MyST Markdown that jupytext reads. Its code cells may say, in options:

    :tags: [raises-exception]                       it ends in an error, and that is meant
    :tags: [nbval-ignore-output]                    its output differs from time to time
    :quote: allhands.parallel.messages:token_ring   its source is that of this function or class (a decorator left out)
    :answer: allhands.parallel.messages:deliver     the same in a lesson, where the body is what the learner writes
    :task: {points: 2}                              in a lesson: it checks the answer, `check("ranks_and_messages.deliver", deliver)`

In the prose `{{ expression }}` is filled in: it sees the package `allhands`, its modules, and `FACTS`, the numbers of facts.toml, which
have their source there; what follows a colon is a format, as in an f-string. Whatever else looks like a directive is an error, with its
file and line, and so is a name that is not there.
"""

import ast
import hashlib
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jupytext
from nbformat import NotebookNode, from_dict
from nbgrader.preprocessors import ClearSolutions

from allhands import exercises

ROOT = Path(__file__).resolve().parent.parent
FACTS = ROOT / "manuscript" / "facts.toml"
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"  # nbgrader's marks
STUB = "raise NotImplementedError"
RAISES = "raises-exception"
_TAGS = {RAISES, "nbval-ignore-output"}
_OPTIONS = {"tags", "quote", "answer", "task"}
_FENCE = re.compile(r"^\s*(?:`{3,}|~{3,}|:{3,})\s*\{")
_EXPRESSION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)


class ManuscriptError(Exception):
    """A text says something that cannot be built. Its message begins with the file and the line."""


class Text:
    """One text of the manuscript."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_lesson = path.parent.name == "lesson"
        self.source = path.read_text()
        self.lines = self.source.splitlines()
        self._cell_lines = [number for number, line in enumerate(self.lines, 1) if line.startswith("```{code-cell}")]

    @property
    def topic(self) -> str:
        """`ranks_and_messages` of `01_ranks_and_messages`."""
        return re.sub(r"^\d+_", "", self.path.stem)

    def error(self, line: int, what: str) -> ManuscriptError:
        """What is wrong, and where."""
        return ManuscriptError(f"{self.path.relative_to(ROOT)}, line {line}: {what}")

    def line_of(self, text: str) -> int:
        """The line on which something stands for the first time."""
        first = text.strip().splitlines()[0]
        return next((number for number, line in enumerate(self.lines, 1) if first in line), 1)

    def cells(self, notebook: NotebookNode) -> Iterator[tuple[NotebookNode, int]]:
        """The notebook's code cells, with the line on which each begins."""
        return zip((cell for cell in notebook.cells if cell.cell_type == "code"), self._cell_lines, strict=True)


def read(path: Path) -> NotebookNode:
    """The notebook that a text says, not yet run; of a lesson, the one with its answers."""
    text = Text(path)
    notebook = jupytext.reads(text.source, fmt="md:myst")
    notebook.metadata = NotebookNode(kernelspec=notebook.metadata["kernelspec"], language_info=NotebookNode(name="python"))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.cells = [part for cell in notebook.cells for part in _sections(cell)]
    _fill_in(text, notebook)
    for cell, line in text.cells(notebook):
        _read_options(text, cell, line)
    if text.is_lesson:
        _check_tasks(text, notebook)
    _number(text, notebook)
    return notebook


def without_answers(solved: NotebookNode) -> NotebookNode:
    """A lesson as a learner gets it: nbgrader takes the answers out, and each check is expected to say so."""
    preprocessor = ClearSolutions(code_stub={"python": STUB})
    notebook, _ = preprocessor.preprocess(from_dict(solved), {})
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.metadata["tags"] = [RAISES]
    return notebook


# --- prose --------------------------------------------------------------------------------------------------------


def _sections(cell: NotebookNode) -> list[NotebookNode]:
    """A cell, or for prose one for each section that begins in it."""
    if cell.cell_type == "code":
        return [cell]
    parts = re.split(r"\n+(?=#{1,6} )", cell.source)
    return [NotebookNode({**cell, "source": part}) for part in parts]


def _fill_in(text: Text, notebook: NotebookNode) -> None:
    """Numbers into the prose; and nothing in it may look as if it should have been a directive."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if _FENCE.match(line):
                    raise text.error(text.line_of(line), f"there is no directive {line.strip()!r}: only {{code-cell}}")
            cell.source = _EXPRESSION.sub(lambda found: _value(text, found), cell.source)
            if "{{" in cell.source or "}}" in cell.source:
                at = next(line for line in cell.source.splitlines() if "{{" in line or "}}" in line)
                raise text.error(text.line_of(at), "braces that do not belong together: write {{ expression }}")


class _Package:
    """`allhands` in an expression: its modules are there without an import."""

    def __getattr__(self, name: str) -> Any:
        try:
            return import_module(f"allhands.{name}")
        except ModuleNotFoundError:
            return getattr(import_module("allhands"), name)


def facts() -> SimpleNamespace:
    """The numbers from elsewhere, by name."""
    entries = tomllib.loads(FACTS.read_text())
    for name, entry in entries.items():
        if entry.keys() != {"value", "what", "source"}:
            raise ManuscriptError(f"{FACTS.relative_to(ROOT)}: {name} needs value, what and source, and nothing else")
    return SimpleNamespace(**{name: entry["value"] for name, entry in entries.items()})


def _value(text: Text, found: re.Match[str]) -> str:
    try:
        return str(eval("f'''{" + found[1].strip() + "}'''", {"allhands": _Package(), "FACTS": facts()}))
    except Exception as error:
        raise text.error(text.line_of(found[0]), f"{found[0]} cannot be filled in: {type(error).__name__}: {error}") from None


# --- code cells ---------------------------------------------------------------------------------------------------


def _read_options(text: Text, cell: NotebookNode, line: int) -> None:
    """Turn a cell's options into its source, and into metadata that notebooks know."""
    options = dict(cell.metadata)
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise text.error(line, f"there is no option {sorted(unknown)[0]!r}: only {', '.join(sorted(_OPTIONS))}")
    tags = options.get("tags", [])
    if set(tags) - _TAGS:
        raise text.error(line, f"there is no tag {sorted(set(tags) - _TAGS)[0]!r}: only {', '.join(sorted(_TAGS))}")
    cell.metadata = NotebookNode({"tags": list(tags)} if tags else {})
    if not text.is_lesson and options.keys() & {"answer", "task"}:
        raise text.error(line, "only lessons have answers and tasks")
    if len(options.keys() & {"quote", "answer", "task"}) > 1:
        raise text.error(line, "a cell is a quotation, an answer, or a task, not two of them")
    for name in ("quote", "answer"):
        if name in options:
            if cell.source.strip():
                raise text.error(line, f"a cell with {name} has no text of its own")
            source, body = _quoted(text, line, options[name])
            cell.source = source if name == "quote" else f"{source[:body]}    {BEGIN}\n{source[body:]}\n    {END}"
    if not cell.source.strip():
        raise text.error(line, "an empty cell")
    if "answer" in options:
        cell.metadata["nbgrader"] = _nbgrader(f"{text.topic}-{options['answer'].rpartition(':')[2]}", is_answer=True)
    if "task" in options:
        found = re.fullmatch(rf'check\("{text.topic}\.(\w+)", (\w+)\)', cell.source.strip())
        if not found or found[1] != found[2]:
            raise text.error(line, f'a task is one line: check("{text.topic}.NAME", NAME)')
        points = options["task"].get("points") if isinstance(options["task"], dict) and len(options["task"]) == 1 else None
        if not isinstance(points, int) or points < 1:
            raise text.error(line, f"a task says what it is worth, {{points: 2}}, but here stands {options['task']}")
        cell.metadata["nbgrader"] = _nbgrader(f"check-{text.topic}-{found[1]}", is_answer=False) | {"points": points}


def _nbgrader(grade_id: str, is_answer: bool) -> dict[str, Any]:
    """What nbgrader wants to know of a cell, in its schema 3."""
    return {
        "schema_version": 3,
        "grade_id": grade_id.replace("_", "-"),
        "solution": is_answer,
        "grade": not is_answer,
        "locked": not is_answer,
        "task": False,
    }


def _quoted(text: Text, line: int, address: str) -> tuple[str, int]:
    """The source of a function or class, `module:name`, and the place in it at which the body begins, behind the docstring."""
    module, colon, name = address.partition(":")
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not colon or not path.is_file():
        raise text.error(line, f"there is no module {module!r} to quote from: write package.module:name")
    source = path.read_text()
    node = next((each for each in ast.parse(source).body if getattr(each, "name", None) == name), None)
    if node is None:
        raise text.error(line, f"{module} has no function or class {name!r} to quote")
    lines = source.splitlines()
    begin = node.body[0].end_lineno if ast.get_docstring(node) and len(node.body) > 1 else node.body[0].lineno - 1
    head, body = lines[node.lineno - 1 : begin], lines[begin : node.end_lineno]
    kept = "".join(f"{each}\n" for each in head)
    return kept + "\n".join(body), len(kept)


# --- lessons ------------------------------------------------------------------------------------------------------


def _check_tasks(text: Text, notebook: NotebookNode) -> None:
    """Every task of the topic is there once, in its order, behind its answer."""
    if text.topic not in exercises.topics():
        raise text.error(1, f"there are no exercises for {text.topic!r}: is there a package allhands/exercises/{text.topic}?")
    wanted = [each.rpartition(".")[2] for each in exercises.task_ids(text.topic)]
    answer, found = None, []
    for cell, line in text.cells(notebook):
        about = cell.metadata.get("nbgrader")
        if about and about["solution"]:
            answer = re.search(r"^def (\w+)", cell.source, re.MULTILINE)
        elif about:
            name = cell.source.strip().partition(".")[2].partition('"')[0]
            if answer is None or answer[1] != name:
                raise text.error(line, f"the cell with the answer {name} has to come before its check")
            found.append(name)
            answer = None
    if found != wanted:
        raise text.error(1, f"the tasks are {', '.join(found)}, but allhands/exercises/{text.topic} has {', '.join(wanted)}")


def _number(text: Text, notebook: NotebookNode) -> None:
    """Ids that depend on a cell's section and its place in that, so that an edit does not renumber the rest."""
    section, place, seen = text.path.stem, 0, set()
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            section, place = cell.source.partition("\n")[0], 0
            if section in seen:
                raise text.error(text.line_of(section), f"two sections have the heading {section!r}")
            seen.add(section)
        cell.id = hashlib.sha256(f"{text.path.stem}/{section}/{place}".encode()).hexdigest()[:12]
        place += 1
