"""What a task of a lesson is: its cases, the mistakes that are known, its hints."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allhands.events import P2P, Kind
from allhands.trace import Trace


@dataclass(frozen=True, eq=False)
class Case:
    """One situation in which an answer is tried: the number of ranks, and each rank's arguments, in the order of the ranks.

    `told`: what else is special about it, to follow "with 3 ranks, ".
    """

    world_size: int
    arguments: Sequence[tuple[Any, ...]]
    told: str = ""

    def __post_init__(self) -> None:
        assert len(self.arguments) == self.world_size


@dataclass(frozen=True, eq=False)
class Mistake:
    """A wrong answer as learners write it, and the sentences that tell them what it does."""

    says: str
    code: Callable[..., Any]


@dataclass(frozen=True)
class Riddle:
    """A program of which a learner foretells something. It is shown when the prediction was right."""

    program: Callable[[], Any]
    world_size: int


@dataclass(frozen=True, eq=False)
class Task:
    """What a learner has to write, and how it is judged.

    `solution`: it gives the task its name and its arguments. `cases`: the most telling one first. `expected(case)`: what each rank has to
    return, in the order of the ranks. `mistakes`: wrong answers that are known. `hints`: each tells more than the one before.
    `ledger(case)`: what the ledger has to say by field of `Account`, a number for each rank, or one for all together; `because`: why.
    `promise(case, trace)`: what else must hold of the messages; an empty text if it does, else what is broken. `fills`: the positions of
    those arguments that the function has to change; all others must stay as they are. `allowed`: the kinds of operations that it may use.
    `riddle`: for a prediction. Then what is expected is the answer itself, and is not told.
    """

    solution: Callable[..., Any]
    cases: Sequence[Case]
    expected: Callable[[Case], Sequence[Any]]
    mistakes: Sequence[Mistake]
    hints: tuple[str, str, str]
    ledger: Callable[[Case], Mapping[str, Sequence[int] | int]] = lambda case: {}
    because: str = ""
    promise: Callable[[Case, Trace], str] = lambda case, trace: ""
    fills: Collection[int] = ()
    allowed: Collection[Kind] = P2P
    riddle: Riddle | None = None

    @property
    def name(self) -> str:
        """What the function is called."""
        return self.solution.__name__
