"""What nbval lets pass in a notebook: cells that never ran, errors that nobody meant, names that are not there."""

import ast
import builtins
import re
import subprocess
import symtable
import sys
from pathlib import Path

import nbformat
import pytest

from kernels import kernel
from pytests import pytest_as_here

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path for folder in ("notebooks", "solutions", "lessons") for path in (ROOT / folder).glob("*.ipynb"))
SOLUTIONS = [path for path in NOTEBOOKS if path.parent.name == "solutions"]
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def is_tagged(cell, tag):
    return tag in cell.metadata.get("tags", [])


def test_notebooks_are_what_the_manuscript_says():
    subprocess.run([sys.executable, ROOT / "tools" / "build_notebooks.py", "--check"], check=True)


def test_each_lesson_has_its_solution():
    names = [{path.name for path in (ROOT / folder).glob("*.ipynb")} for folder in ("lessons", "solutions")]
    assert names[0] == names[1] != set()


@every_notebook
def test_a_notebook_has_been_run_from_top_to_bottom_and_is_tidy(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == is_tagged(cell, "raises-exception"), cell.source
        assert not any(output.output_type == "stream" and output.name == "stderr" for output in cell.outputs), cell.source
        assert "execution" not in cell.metadata
        assert cell.outputs or says_nothing(cell.source), f"no output stored, so nothing is checked: {cell.source}"
    assert sum(is_tagged(cell, "nbval-ignore-output") for cell in cells) <= 2
    assert path.stat().st_size < 300_000


def says_nothing(source):
    """Whether a cell ends in a statement, and so may be silent."""
    if source.startswith("%%ranks"):
        return False
    tree = ast.parse(re.sub(r"^%.*$", "pass", source, flags=re.MULTILINE))
    return not isinstance(tree.body[-1], ast.Expr)


@every_notebook
def test_what_nbval_does_not_compare_is_not_stored(path):
    """It skips PNG and JPEG; and JupyterLab would show an error over the figure beside a stored widget."""
    kinds = {kind for cell in code_cells(path) for output in cell.outputs for kind in output.get("data", {})}
    assert kinds <= {"text/plain", "text/html"}
    assert "widget-state" not in path.read_text()


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_a_lesson_is_its_solution_without_the_answers(path):
    """But for its outputs: there, every check fails as not started."""
    unsolved, solved = code_cells(ROOT / "lessons" / path.name), code_cells(path)
    assert len(unsolved) == len(solved)
    for lesson, solution in zip(unsolved, solved, strict=True):
        about = solution.metadata.get("nbgrader", {})
        assert about == lesson.metadata.get("nbgrader", {}) and solution.id == lesson.id
        assert (solution.source == lesson.source) == (not about.get("solution", False))
        if about.get("grade"):
            (error,) = lesson.outputs
            assert error.ename == "CheckFailed" and "is not started: it still raises NotImplementedError" in error.evalue
            assert solution.outputs[0].data["text/plain"].startswith("✓ ")


# --- names --------------------------------------------------------------------------------------------------------

IN_RANKS = {"torch", "dist", "rank", "world_size"}


def names(source):
    """What a cell sets, and what it looks up but does not set itself."""
    table = symtable.symtable(source, "cell", "exec")
    sets = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported() or each.is_namespace()}
    return sets, set(looked_up(table)) - sets


def looked_up(table, is_top=True):
    for each in table.get_symbols():
        if each.is_referenced() if is_top else each.is_global():
            yield each.get_name()
    for child in table.get_children():
        yield from looked_up(child, is_top=False)


@every_notebook
def test_each_name_is_defined_before_it_is_used(path):
    known = set(dir(builtins))
    for cell in code_cells(path):
        first, _, rest = cell.source.partition("\n")
        if first.startswith("%%ranks"):
            _, wanted = names(rest)
            assert wanted <= known | IN_RANKS, cell.source
            known |= set(re.findall(r"--as (\w+)", first))
        else:
            sets, wanted = names(re.sub(r"^%.*$", "pass", cell.source, flags=re.MULTILINE))
            assert wanted <= known, cell.source
            known |= sets


def test_a_name_that_is_not_there_is_seen():
    assert names("import os\ndef f(x):\n    return x + y\nclass A:\n    b = z\nprint(f, os)") == ({"os", "f", "A"}, {"print", "y", "z"})


# --- sections -----------------------------------------------------------------------------------------------------


def sections(path):
    """The code cells by section; the first is what all others need."""
    found = [[]]
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            found.append([])
        elif cell.cell_type == "code":
            found[-1].append(cell)
    return found


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_each_task_runs_after_the_setup_and_its_own_section(path, fork_server):
    setup, *others = sections(path)
    with kernel() as notebook:
        checked = 0
        for section in others:
            notebook.cell("%reset -f")
            for cell in (*setup, *section):
                reply = notebook.cell(cell.source)
                assert bool(reply.error) == is_tagged(cell, "raises-exception"), reply.error
                checked += "✓" in reply.shown
    assert checked == sum(cell.metadata.get("nbgrader", {}).get("grade", False) for cell in code_cells(path)) > 0


# --- nbval is strict ----------------------------------------------------------------------------------------------


def test_a_changed_output_turns_nbval_red(tmp_path):
    notebook = nbformat.read(ROOT / "notebooks" / "start_here.ipynb", as_version=4)
    changed = 0
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "execute_result" and "6., 6." in output.data["text/plain"]:
                output.data["text/plain"] = "[0-3] tensor([6., 7.])"
                changed += 1
    assert changed == 1
    nbformat.write(notebook, tmp_path / "changed.ipynb")
    done = pytest_as_here(tmp_path, "changed.ipynb", "--nbval", "--nbval-current-env")
    assert "1 failed" in done.stdout and "tensor([6., 7.])" in done.stdout
    assert "changed.ipynb::changed: One cell, four processes, code cell 2" in done.stdout


def test_a_changed_picture_turns_nbval_red(tmp_path):
    """One coordinate of one arrow, in the still figure below the slider."""
    notebook = nbformat.read(ROOT / "notebooks" / "start_here.ipynb", as_version=4)
    (explored,) = (cell for cell in notebook.cells if "explore(show" in cell.source)
    (output,) = explored.outputs
    before = output.data["text/html"]
    output.data["text/html"] = before.replace('x2="', 'x2="1', 1)
    assert output.data["text/html"] != before and before.count("<svg") == 1
    nbformat.write(notebook, tmp_path / "changed.ipynb")
    done = pytest_as_here(tmp_path, "changed.ipynb", "--nbval", "--nbval-current-env")
    assert "1 failed" in done.stdout and "changed: See what they send, code cell 12" in done.stdout
