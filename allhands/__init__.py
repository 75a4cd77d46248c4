"""All Hands: distributed training, learnt by hand. `run` calls a function in N real processes; `%%ranks` does it with a cell."""

from importlib import import_module
from typing import Any

_HOME = {
    "check": "checking",
    "hint": "checking",
    "CheckFailed": "checking",
    "draw": "pictures",
    "explore": "controls",
    "progress": "marks",
    "run": "launch",
    "Run": "watch",
    "RankError": "errors",
    "RankDeadlock": "errors",
    "RankTimeout": "errors",
}

__all__ = [
    "CheckFailed",
    "RankDeadlock",
    "RankError",
    "RankTimeout",
    "Run",
    "check",
    "draw",
    "explore",
    "hint",
    "load_ipython_extension",
    "progress",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for and no more (PEP 562), so that a rank never imports IPython."""
    if name not in _HOME:
        raise AttributeError(f"module 'allhands' has no attribute {name!r}")
    return getattr(import_module(f"allhands.{_HOME[name]}"), name)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext allhands`: start the fork server, so that it imports torch while the notebook does, and give `%%ranks`."""
    forkserver = import_module("allhands.forkserver")
    if forkserver.is_possible:
        forkserver.server.ensure_started()
    import_module("allhands.notebook").register(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
