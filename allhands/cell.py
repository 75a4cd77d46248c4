"""The body of a `%%ranks` cell as a function that runs in a rank, in the notebook's own namespace."""

import ast
import linecache
import symtable
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from allhands.stack import THIS_CELL

_IPYTHONS_OWN = {"exit", "quit", "get_ipython"}


def _names_of(table: symtable.SymbolTable, is_top: bool = True) -> Iterator[str]:
    """The names that a cell looks up in the notebook: those of its own level, and the globals of its functions."""
    for symbol in table.get_symbols():
        # A class body looks a name up in the notebook even if it sets it: class A: x = x
        if is_top or symbol.is_global() or (table.get_type() == "class" and symbol.is_referenced()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _names_of(child, is_top=False)


def _remember(source: str) -> None:
    """Let tracebacks, here and in a rank, find the lines of the cell."""
    linecache.cache[THIS_CELL] = (len(source), None, source.splitlines(keepends=True), THIS_CELL)


def _carrier(names: Iterable[str], notebook: dict[str, Any]) -> types.FunctionType:
    """A function of the notebook that does nothing but name these variables."""
    naming = compile(f"def carrier(): return ({''.join(f'{name}, ' for name in sorted(names))})", THIS_CELL, "exec")
    (code,) = (constant for constant in naming.co_consts if isinstance(constant, types.CodeType))
    return types.FunctionType(code, notebook)


@dataclass(frozen=True)
class CellValue:
    """What the last expression of a cell was: as text, and itself if it was asked for."""

    text: str
    value: Any


@dataclass(frozen=True)
class Cell:
    """A cell's source, and the notebook's variables that it names. Called in a rank, it gives a `CellValue`.

    The variables travel as the globals of a function that names them all, so that the notebook's functions and the cell
    share one namespace in the rank as they do in the notebook: a variable that the cell sets is seen by the functions it calls.
    """

    source: str
    carrier: types.FunctionType
    keeps_value: bool
    sets: frozenset[str]

    @classmethod
    def of(cls, source: str, notebook: dict[str, Any], keeps_value: bool) -> "Cell":
        """A cell that sees the variables of `notebook`. Raises SyntaxError, with the cell's line."""
        _remember(source)
        compile(source, THIS_CELL, "exec")
        table = symtable.symtable(source, THIS_CELL, "exec")
        sets = frozenset(symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported())
        names = {*_names_of(table)} & notebook.keys() - _IPYTHONS_OWN
        return cls(source, _carrier(names, notebook), keeps_value, sets)

    def without(self, names: set[str]) -> "Cell":
        """The same cell, without some of the notebook's variables."""
        return replace(self, carrier=_carrier(self.variables.keys() - names, self.namespace))

    @property
    def variables(self) -> dict[str, Any]:
        """The notebook's variables that the cell names."""
        return {name: self.namespace[name] for name in self.carrier.__code__.co_names}

    @property
    def namespace(self) -> dict[str, Any]:
        """The cell's globals: in the notebook all of its variables, in a rank those that the cell names."""
        return self.carrier.__globals__

    def __call__(self) -> CellValue | None:
        """Run the cell. None if it does not end in an expression, or if that is None, or hidden by a semicolon."""
        _remember(self.source)
        self.namespace.update(torch=torch, dist=dist, rank=dist.get_rank(), world_size=dist.get_world_size())
        tree = ast.parse(self.source, THIS_CELL)
        is_shown = tree.body and isinstance(tree.body[-1], ast.Expr) and not self.source.rstrip().endswith(";")
        last = tree.body.pop() if is_shown else None
        exec(compile(tree, THIS_CELL, "exec"), self.namespace)
        if last is None:
            return None
        value = eval(compile(ast.Expression(last.value), THIS_CELL, "eval"), self.namespace)
        if value is None:
            return None
        try:
            return CellValue(repr(value), value if self.keeps_value else None)
        except Exception as error:
            error.add_note("while the value of the cell's last line was made into text")
            raise
