"""`%%ranks`: a notebook cell that runs in N processes. The only module that needs IPython."""

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from allhands.cell import Cell, CellValue
from allhands.errors import CellSyntaxError
from allhands.launch import run
from allhands.printed import fold
from allhands.stack import THIS_CELL, Frame
from allhands.watch import Run


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
    @argument("world_size", nargs="?", default="4", help="The number of ranks; a variable goes in braces: %%%%ranks {n}.")
    @argument("--as", dest="name", help="Keep the Run in this variable: its results are the last expression's values.")
    @argument("--timeout", type=float, default=30.0, help="Seconds until the ranks are stopped.")
    @argument("--stream", action="store_true", help="Show what the ranks print as it comes, not at the end in rank order.")
    @cell_magic
    def ranks(self, line: str, cell: str) -> RankValues | None:
        """Run this cell in N new processes that share a process group.

        In scope: what the cell names of the notebook's variables, and torch, dist, rank, world_size.
        """
        options = parse_argstring(self.ranks, line)
        notebook = self.shell.user_ns
        try:
            world_size = int(options.world_size)
        except ValueError:
            raise UsageError(
                f"%%ranks needs a whole number of ranks, as in %%ranks 4, but got {options.world_size!r}. "
                "A variable goes in braces: %%ranks {n}"
            ) from None
        if options.name is not None and not options.name.isidentifier():
            raise UsageError(f"%%ranks --as needs the name of a variable, but got {options.name!r}")
        try:
            # The magic's own line stays as a blank one, so that lines count as the reader counts them.
            body = Cell.of(f"\n{cell}", notebook, keeps_value=options.name is not None)
        except SyntaxError as error:
            raise _explain(error) from None
        try:
            job = run(body, world_size=world_size, timeout=options.timeout, stream=options.stream)
        except (TypeError, ValueError) as error:
            raise UsageError(f"%%ranks: {error}") from None
        if options.name is not None:
            notebook[options.name] = Run([value and value.value for value in job.results], job.output)
        return RankValues(job.results) if any(job.results) else None


def _explain(error: SyntaxError) -> CellSyntaxError:
    text = (error.text or "").rstrip("\n")
    place = Frame(THIS_CELL, error.lineno or 0, "<module>").place
    pointer = " " * (min(error.offset or 1, len(text) + 1) - 1) + "^"
    parts = [f"{error.msg}\n\n  {place}\n      {text}\n      {pointer}"]
    if text.lstrip().startswith(("%", "!")):
        parts.append("Magics and shell commands work in the notebook, not in ranks: put this line in a cell of its own.")
    return CellSyntaxError("\n\n".join(parts))


def register(shell: Any) -> None:
    """Give `%%ranks` to a notebook."""
    shell.register_magics(RanksMagic)
