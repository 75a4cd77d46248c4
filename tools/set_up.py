"""Make .venv and install the course into it, if that is not done yet: `python3 tools/set_up.py [--dev] [--newest]`.

--dev     also what tests and building need
--newest  take the newest versions instead of constraints.txt's (but for torch), and write those down there

Needs nothing but Python's standard library, and is written so that a Python that is too old can still say so.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "set_up.json")
CONSTRAINTS = os.path.join(ROOT, "constraints.txt")
OLDEST = (3, 11)
CANDIDATES = ("python3.11", "python3.12", "python3.13", "python3.14")
GPU_PARTS = ("nvidia-", "cuda-", "triton==")
HEADER = "# The versions that the committed outputs were made with. `make constraints` writes this file.\n"


def give_up(what: str, try_this: str) -> None:
    """End with what happened and what to do about it."""
    sys.exit("\nmake: %s\n      %s\n" % (what, try_this))  # noqa: UP031 (an old Python reads this file too)


def use_a_new_enough_python() -> None:
    """Go on in a Python that is new enough, if this one is not and there is one."""
    if sys.version_info >= OLDEST:
        return
    for name in CANDIDATES:
        path = shutil.which(name)
        if path and subprocess.call([path, "-c", ""]) == 0:
            os.execv(path, [path, *sys.argv])
    give_up(
        "All Hands needs Python 3.11 or newer, but %s is %d.%d" % (sys.executable, *sys.version_info[:2]),  # noqa: UP031
        "Install a newer one and name it: make lab PYTHON=/path/to/python3.12",
    )


def wanted(dev: bool) -> dict:
    """What the stamp must say for the set-up to be up to date."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", os.path.join("tools", "set_up.py")):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return {"files": digest.hexdigest(), "root": ROOT, "dev": dev}


def last_set_up() -> dict:
    """What the stamp says, or nothing if there is none."""
    try:
        with open(STAMP) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def make_venv() -> str:
    """A virtual environment in .venv, made anew if it is broken or was moved here. Returns its Python."""
    python = os.path.join(VENV, "bin", "python")
    works = os.path.exists(python) and subprocess.call([python, "-c", "import pip"], stderr=subprocess.DEVNULL) == 0
    if not works:
        print("Making .venv with %s …" % sys.executable, flush=True)  # noqa: UP031
        if subprocess.call([sys.executable, "-m", "venv", "--clear", VENV]) != 0:
            shutil.rmtree(VENV, ignore_errors=True)
            give_up(
                "python could not make a virtual environment (its reason is above).",
                "On Debian and Ubuntu: apt-get install python3-venv. If there is no space, make some. Then run make again.",
            )
    return python


def install(python: str, dev: bool, newest: bool) -> None:
    """The course, in place, and what it needs."""
    print("Installing; the first time this takes some minutes …", flush=True)
    command = [python, "-m", "pip", "install", "--quiet", "--editable", ROOT + ("[dev]" if dev else "")]
    if newest:
        with open(CONSTRAINTS) as file:
            command += [line.strip() for line in file if line.startswith("torch==")]
    else:
        command += ["--constraint", CONSTRAINTS]
    if subprocess.call(command) != 0:
        give_up(
            "pip could not install everything (its reason is above).",
            "If a download failed: look at your network or proxy and run make again; what is there already is not fetched twice. "
            "README.md says how to get the small CPU build of torch.",
        )


def write_constraints(python: str) -> None:
    """Every version that is installed now, without the mark of a local build and what torch itself asks for on a GPU."""
    freeze = subprocess.check_output([python, "-m", "pip", "freeze", "--exclude-editable"], text=True)
    lines = [line.partition("+")[0] for line in freeze.splitlines() if "==" in line and not line.startswith(GPU_PARTS)]
    with open(CONSTRAINTS, "w") as file:
        file.write(HEADER + "".join(line + "\n" for line in lines))


def quiet_lab() -> None:
    """JupyterLab asks every new user whether to fetch news; thirty learners in a workshop need not be asked."""
    folder = os.path.join(VENV, "share", "jupyter", "lab", "settings")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "overrides.json"), "w") as file:
        json.dump({"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}, file)


def main() -> None:
    """Do what is asked for, or nothing if it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", action="store_true")
    parser.add_argument("--newest", action="store_true")
    options = parser.parse_args()
    use_a_new_enough_python()
    dev = options.dev or last_set_up().get("dev", False)  # What was there for tests stays.
    if not options.newest and last_set_up() == wanted(dev):
        return
    if not os.access(ROOT, os.W_OK):
        give_up(f"{ROOT} cannot be written by you.", "Copy the course to a folder of your own, and run make there.")
    try:
        if options.newest:
            shutil.rmtree(VENV, ignore_errors=True)
        python = make_venv()
        install(python, dev, options.newest)
        if options.newest:
            write_constraints(python)
        quiet_lab()
        with open(STAMP, "w") as file:
            json.dump(wanted(dev), file)
    except OSError as error:
        give_up(
            f"{error.filename or VENV} cannot be written ({error.strerror}).",
            "Look at its owner and at the free space, then run make again.",
        )


if __name__ == "__main__":
    main()
