"""`%%ranks`: a notebook cell that runs in N processes."""

import keyword
import re
from dataclasses import replace
from types import TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from allhands.cell import Cell, CellValue
from allhands.checking import CheckFailed
from allhands.errors import CellSyntaxError, RankDeadlock, RankError, RunInterrupted
from allhands.job import COMPUTE
from allhands.launch import run
from allhands.pictures import draw
from allhands.printed import fold
from allhands.stack import THIS_CELL, Frame


class RankValues:
    """The last expression's value in each rank, as text; equal ones are folded."""

    def __init__(self, values: list[CellValue | None]) -> None:
        self._texts = ["" if value is None else value.text for value in values]

    def __repr__(self) -> str:
        return fold(self._texts).removesuffix("\n")


@magics_class
class RanksMagic(Magics):
    """The magic, bound to one notebook."""

    @magic_arguments()
    @argument("world_size", nargs="?", default="4", help="Number of ranks (4 if left out). A variable goes in braces: %%%%ranks {n}.")
    @argument(
        "--as", dest="name", help="Keep the Run: NAME.results (values of the last line), NAME.output, NAME.trace; the error, if it fails."
    )
    @argument("--timeout", type=float, default=30.0, help="Seconds until the ranks are stopped (30; inf: never).")
    @argument("--seed", type=int, default=0, help="The ranks' random numbers are made from it (0): every run draws the same.")
    @argument(
        "--record", choices=["on", "off", COMPUTE], default="on", help="What NAME.trace holds: messages (on); operators too (compute)."
    )
    @argument("--stream", action="store_true", help="Show what the ranks print line by line as it comes, not at the end in rank order.")
    @cell_magic
    def ranks(self, line: str, cell: str) -> RankValues | None:
        """Run this cell in as many new processes (ranks) as you say, in one process group.

        The cell can use the notebook's variables, functions and imports (each rank has its own copies), and torch,
        dist (torch.distributed), rank and world_size. What it sets is gone afterwards; the value of its last line is shown, for each rank.
        """
        try:
            options = parse_argstring(self.ranks, line)
        except UsageError as error:
            raise UsageError(f"{error}. %%ranks? tells what can be said here") from None
        notebook = self.shell.user_ns
        try:
            world_size = int(options.world_size)
        except ValueError:
            raise UsageError(
                f"%%ranks needs a whole number of ranks, as in %%ranks 4, but got {options.world_size!r}. "
                "A variable goes in braces: %%ranks {n}"
            ) from None
        if options.name is not None and (not options.name.isidentifier() or keyword.iskeyword(options.name)):
            raise UsageError(f"%%ranks --as needs the name of a variable, but got {options.name!r}")
        try:
            # The magic's own line stays as a blank one, so that lines count as the reader counts them.
            body = Cell.of(f"\n{cell}", notebook, keeps_value=options.name is not None)
        except SyntaxError as error:
            raise self._explain(error, cell) from None
        except (RecursionError, MemoryError):
            raise CellSyntaxError("this cell is nested too deeply for Python to read") from None
        try:
            record = {"on": True, "off": False}.get(options.record, options.record)
            job = run(body, world_size=world_size, timeout=options.timeout, record=record, seed=options.seed, stream=options.stream)
        except (TypeError, ValueError) as error:
            raise UsageError(f"%%ranks: {error}") from None
        except (RankError, RunInterrupted) as error:
            if options.name is not None:
                notebook[options.name] = error  # What was there before would be taken for this run's.
            raise
        if options.name is not None:
            notebook[options.name] = replace(job, results=[value and value.value for value in job.results])
        return RankValues(job.results) if any(job.results) else None

    def _explain(self, error: SyntaxError, cell: str) -> CellSyntaxError:
        lines = ["", *cell.split("\n"), ""]  # The first is the magic's.
        number = min(error.lineno or 1, len(lines))  # It may be behind the end.
        text = lines[number - 1]
        place = Frame(THIS_CELL, number, "<module>").place
        pointer = " " * (min(error.offset or 1, len(text) + 1) - 1) + "^"
        parts = [f"{error.msg}\n\n  {place}\n      {text}\n      {pointer}"]
        if re.search(r"=\s*[!%]", text) or "get_ipython()" in self.shell.transform_cell(text.strip()):
            parts.append("Magics, shell commands and ? work in the notebook, not in ranks: put this line in a cell of its own.")
        if "'return' outside function" in str(error.msg):
            parts.append("A cell's result is the value of its last line: leave return out.")
        return CellSyntaxError("\n\n".join(parts))


def _show_with_picture(
    shell: Any, kind: type, error: RankDeadlock | CheckFailed, traceback: TracebackType, tb_offset: int | None = None
) -> None:
    """What went wrong is drawn before it is told."""
    picture = draw(error) if isinstance(error, RankDeadlock) else error.picture
    if picture:
        display(picture)
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)


def register(shell: Any) -> None:
    """Give `%%ranks` to a notebook, and pictures to its deadlocks and failed checks."""
    shell.register_magics(RanksMagic)
    shell.set_custom_exc((RankDeadlock, CheckFailed), _show_with_picture)
