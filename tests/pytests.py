"""pytest in a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pytest_as_here(folder, path, *options, **environment):
    """pytest with this project's conftest.py, on something that is elsewhere."""
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-c", ROOT / "pyproject.toml", "-o", f"addopts={' '.join(options)}"]
    command += ["--rootdir", folder, folder / path]
    shutil.copy(ROOT / "conftest.py", folder)
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)
