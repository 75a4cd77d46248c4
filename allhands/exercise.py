"""What a task of a lesson is: its cases, the mistakes that are known, its hints."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allhands.events import P2P, Kind


@dataclass(frozen=True)
class Case:
    """One situation in which an answer is tried: the number of ranks, and each rank's arguments, in the order of the ranks."""

    world_size: int
    arguments: Sequence[tuple[Any, ...]]

    def __post_init__(self) -> None:
        assert len(self.arguments) == self.world_size


@dataclass(frozen=True)
class Mistake:
    """A wrong answer as learners write it, and what to tell them. `says` follows "Your code does what this mistake does:"."""

    says: str
    code: Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """What a learner has to write, and how it is judged.

    `name`: of the function. `goal`: one sentence, in the imperative. `expected(case)`: what each rank has to return, in the order of the ranks. `ledger(case)`: what
    the ledger has to say, by field of `Account`, a number for each rank. `promise(trace)`: what else must hold of the messages; an empty
    text if it does. `fills`: the positions of arguments that the function is to change; all others must stay as they were. `allowed`: the
    kinds of operations that may be used. `is_prediction`: the expected value is the answer itself, so it is not told.
    """

    name: str
    goal: str
    solution: Callable[..., Any]
    cases: Sequence[Case]
    expected: Callable[[Case], Sequence[Any]]
    mistakes: Sequence[Mistake]
    hints: tuple[str, str, str]
    ledger: Callable[[Case], Mapping[str, Sequence[int]]] = lambda case: {}
    promise: Callable[[Any], str] = lambda trace: ""
    fills: Collection[int] = ()
    allowed: Collection[Kind] = P2P
    is_prediction: bool = False
