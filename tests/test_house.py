"""The house rules that a machine can hold."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pytests import pytest_as_here

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "allhands"

# Ground floor first: a module imports only from those before it.
FLOORS = [
    *("printed", "stack", "errors", "events", "matching", "replay", "ledger", "wording", "mismatch", "deadlock", "trace", "afterwards"),
    *(
        "payload",
        "liveness",
        "lineage",
        "loopback",
        "job",
        "cell",
        "report",
        "pen",
        "works",
        "collective_calls",
        "recording_group",
        "recorder",
        "compute",
        "rank",
        "server",
        "script",
        "machines",
    ),
    *("forkserver", "spawn", "interrupt", "torchrun", "stacks", "lookout", "output", "watch", "launch"),
    *("palette", "svg", "lanes", "spacetime", "charts", "condensed", "pictures", "controls"),
    *("causality", "exercise", "parallel", "exercises", "course", "marks", "lessons", "command", "__main__"),
    *("values", "trial", "faults", "checking", "notebook"),
]


def imports_of(path):
    """The modules of the package that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "allhands":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("allhands."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("allhands.")}
    return found


def test_every_module_has_its_floor():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {path.stem for path in PACKAGE.glob("*.py")} | packages == {*FLOORS, "__init__"}


@pytest.mark.parametrize("module", FLOORS)
def test_modules_import_one_way(module):
    below = set(FLOORS[: FLOORS.index(module)])
    files = [PACKAGE / f"{module}.py", *(PACKAGE / module).rglob("*.py")]
    assert set().union(*(imports_of(path) for path in files if path.exists())) - {module} <= below


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("forkserver", {"torch", "IPython"}),
        ("torchrun", {"torch", "IPython"}),
        ("trace", {"torch", "IPython"}),  # Whatever reads a record must not need what made it.
        ("deadlock", {"torch", "IPython"}),
        ("pictures", {"torch", "IPython", "matplotlib"}),
        ("launch", {"IPython", "matplotlib"}),
        ("rank", {"IPython", "matplotlib"}),
        ("exercises", {"torch", "IPython"}),
        ("marks", {"torch", "IPython", "nbformat"}),
        ("command", {"torch", "IPython"}),
    ],
)
def test_what_a_module_does_not_import(module, forbidden):
    """The fork server's handle must not wait for torch, and nothing but the notebook may bring in IPython."""
    program = f"import sys, allhands.{module}; print(sorted({forbidden!r} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_modules_stay_short(path):
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", sorted((PACKAGE / "parallel").glob("*.py")), ids=lambda path: path.stem)
def test_what_notebooks_quote_fits_their_width(path):
    assert max(map(len, path.read_text().splitlines())) <= 105


def conda_requirements(text):
    """Name -> bounds from environment.yml's list, without the parts that only conda has."""
    lines = re.findall(r"^  - ([a-z-]+)([^\s#]*)", text, re.MULTILINE)
    return {name: bounds for name, bounds in lines if name not in ("conda-forge", "nodefaults", "pip", "pip:")}


def test_conda_and_pip_ask_for_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pip = dict(re.fullmatch(r"([a-z-]+)(.*)", requirement).groups() for requirement in wanted)
    pip["pytorch-cpu"] = pip.pop("torch")
    pip["matplotlib-base"] = pip.pop("matplotlib")  # without a window toolkit
    pip["python"] = project["requires-python"]
    assert conda_requirements((ROOT / "environment.yml").read_text()) == pip


def test_every_requirement_has_its_tested_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.match(r"[a-z-]+", name)[0] for name in [*project["dependencies"], *project["optional-dependencies"]["dev"]]}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert wanted <= pinned


# --- in CI nothing is skipped -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
def test_in_ci_nothing_is_skipped(tmp_path, ci, outcome):
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.skip(reason='no screen')\ndef test(): pass\n")
    done = pytest_as_here(tmp_path, "test_it.py", CI=ci)
    assert outcome in done.stdout and "no screen" in done.stdout


# --- setting up ---------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    """A folder that has what setting up needs, but for the right to be what it is."""
    for name in ("tools", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "Makefile"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    return tmp_path


def set_up(folder, *prelude):
    """Run tools/set_up.py with something changed before: lines of Python."""
    program = "\n".join(
        ["import sys, runpy", "sys.argv = ['set_up.py']", *prelude, "runpy.run_path('tools/set_up.py', run_name='__main__')"]
    )
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)


def test_a_python_that_is_too_old_says_so(copy):
    done = set_up(copy, "import shutil; shutil.which = lambda name: None", "sys.version_info = (3, 10, 2)")
    assert done.returncode == 1
    assert "All Hands needs Python 3.11 or newer, but " in done.stderr and "is 3.10" in done.stderr
    assert "make lab PYTHON=/path/to/python3.12" in done.stderr


def test_set_up_is_written_for_old_pythons():
    """It must parse where it can only say that it will not run."""
    ast.parse((ROOT / "tools" / "set_up.py").read_text(), feature_version=(3, 7))


def test_a_failed_download_says_what_to_do(copy):
    prelude = "import subprocess; call = subprocess.call; subprocess.call = lambda c, **k: 1 if 'install' in c else call(c, **k)"
    done = set_up(copy, prelude)
    assert done.returncode == 1
    assert "pip could not install everything" in done.stderr and "run make again" in done.stderr


def test_a_virtual_environment_that_cannot_be_made_says_what_to_do(copy):
    done = set_up(copy, "import subprocess; subprocess.call = lambda c, **k: 1")
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert not (copy / ".venv").exists()


def test_a_folder_that_cannot_be_written_says_so(copy):
    done = set_up(copy, "import os; os.access = lambda path, mode: False")
    assert done.returncode == 1
    assert f"{copy} cannot be written by you" in done.stderr and "Copy the course" in done.stderr


def test_a_full_disk_says_so(copy):
    prelude = "import os; os.makedirs = lambda *a, **k: (_ for _ in ()).throw(OSError(28, 'No space left on device', '.venv'))"
    nothing = "import subprocess; subprocess.call = lambda c, **k: 0"
    done = set_up(copy, prelude, nothing)
    assert done.returncode == 1
    assert ".venv cannot be written (No space left on device)" in done.stderr
