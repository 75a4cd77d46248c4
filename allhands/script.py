"""What torchrun starts as each rank: it runs the learner's script, and leaves what that printed and how it ended in files.

Torchrun sorts logs by machine, and which machine gets which ranks is not fixed. A rank knows its number from `RANK`, so it names
its own files.
"""

import faulthandler
import json
import os
import runpy
import sys
import time

from allhands.lineage import live_no_longer_than
from allhands.report import report


def path_of(folder: str, what: str, rank: int | str) -> str:
    """A rank's file: `output` and `errors` is what it printed, `stack` where it stood at the end of its time, `failure` why it failed.

    A rank that has come to the end of its script leaves a file `done`.
    """
    return os.path.join(folder, f"{what}-{rank}")


def is_file(program: str) -> bool:
    """Whether a program is given by its file, and not by the name of a module."""
    return program.endswith(".py")


def main(folder: str, deadline: float, program: str) -> None:
    """Be the script, or module, `program` in a process that torchrun has started. Time ends at `deadline` (of `time.time`)."""
    rank = os.environ["RANK"]
    for what, descriptor in (("output", 1), ("errors", 2)):
        file = os.open(path_of(folder, what, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    live_no_longer_than(folder)
    stack = open(path_of(folder, "stack", rank), "w")
    faulthandler.dump_traceback_later(max(0.001, deadline - time.time()), file=stack)
    sys.argv[1:] = []
    try:
        _run(program)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            with open(path_of(folder, "failure", rank), "w") as failure:
                json.dump({**report(error, without=__file__), "hint": ""}, failure)  # Its hints are for what `run` runs.
            raise
    open(path_of(folder, "done", rank), "w").close()


def _run(program: str) -> None:
    """As `python program.py` or `python -m program` would."""
    if is_file(program):
        path = os.path.abspath(program)
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


DOING = {_run.__name__: "was importing something, or in a library"}
"""What a rank is doing whose stack, as the learner may see it, begins in one of these."""

if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
