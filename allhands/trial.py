"""An answer tried in one case: what it returned, and what it sent."""

import copy
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from allhands.errors import RankError, RankTimeout
from allhands.exercise import Case, Task
from allhands.launch import run
from allhands.output import into, without_last_words
from allhands.printed import fold
from allhands.values import same
from allhands.watch import Run

LIMIT_SECONDS = 3.0
"""For the calls of all cases of a task together. Right answers take some hundredths of a second for each."""

_LEAST_SECONDS, _START_SECONDS = 0.5, 0.5
_BUSY_SECONDS, _PATIENT_SECONDS = 0.25, 30.0
"""If even an empty program takes as long as the first, the machine is busy, and gets as long as the second."""


@dataclass(frozen=True)
class _Call:
    """What one rank's call gave, and the positions of arguments that it changed and should not have."""

    value: Any
    changed: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class _Caller:
    """Calls the answer in a rank."""

    answer: Callable[..., Any]
    arguments: Sequence[tuple[Any, ...]]
    fills: tuple[int, ...]

    def __call__(self) -> _Call:
        mine = self.arguments[dist.get_rank()]
        before = copy.deepcopy(mine)
        begin = time.monotonic()
        returned = self.answer(*mine)
        seconds = time.monotonic() - begin
        places = [place for place in range(len(mine)) if place not in self.fills]
        changed = tuple(place for place in places if not same(mine[place], before[place]))
        return _Call(tuple(mine[place] for place in self.fills) if self.fills else returned, changed, seconds)


@dataclass(frozen=True, eq=False)
class Trial:
    """An answer in one case, and how that ended. `is_borrowed`: the messages came from the course's own solution."""

    task: Task
    case: Case
    answer: Callable[..., Any]
    ended: Run | RankError
    is_borrowed: bool
    limit: float

    @property
    def printed(self) -> str:
        """What the ranks printed, in their order."""
        return fold([without_last_words(text) for text in self.ended.output])

    @property
    def seconds(self) -> float:
        """How long the slowest rank's call took, if all came to an end."""
        return max(result.seconds for result in self.ended.results) if isinstance(self.ended, Run) else 0.0

    @property
    def sent(self) -> list[tuple[int, int]]:
        """How many messages each rank has sent, and of how many bytes."""
        return [(account.messages_out, account.bytes_out) for account in self.ended.trace.ledger().ranks]

    @property
    def has_picture(self) -> bool:
        """Whether there is something to draw."""
        return self.ended.recorded is not None and len(self.ended.trace) > 0


def attempt(task: Task, case: Case, answer: Callable[..., Any], seconds: float = LIMIT_SECONDS) -> Trial:
    """Run an answer in the ranks of one case, for so many seconds at most. What it prints is kept back.

    A time-out on a machine that is busy says nothing about the answer, so it is tried again then, with more patience.
    """
    caller = _Caller(answer, case.arguments, tuple(task.fills))
    limit = LIMIT_SECONDS
    with into([]):
        ended = _run(caller, case.world_size, max(seconds, _LEAST_SECONDS) + _START_SECONDS)
        if isinstance(ended, RankTimeout) and is_busy(case.world_size):
            limit = _PATIENT_SECONDS
            ended = _run(caller, case.world_size, limit)
    return Trial(task, case, answer, ended, is_borrowed=answer is not task.solution and _calls_solution(task, ended), limit=limit)


def _run(caller: _Caller, world_size: int, seconds: float) -> Run | RankError:
    try:
        return run(caller, world_size=world_size, timeout=seconds)
    except RankError as error:
        return error


def is_busy(world_size: int) -> bool:
    """Whether the machine has so much else to do that time tells nothing about an answer."""
    begin = time.monotonic()
    with into([]):
        run(dist.get_rank, world_size=world_size, timeout=math.inf)
    return time.monotonic() - begin > _BUSY_SECONDS


def _calls_solution(task: Task, ended: Run | RankError) -> bool:
    """Whether messages were sent from the course's own solution."""
    if ended.recorded is None:
        return False
    home = inspect.getsourcefile(task.solution)
    return any(frame.filename == home and frame.function == task.name for site in ended.trace.columns.sites for frame in site.place)
