"""A run again, on paper: every message takes one unit of time, and a rank sends one at a time and receives one at a time.

The program of each rank is gone through as it was recorded: what it began, what it waited for. A message starts when its send and its
receive have both been issued (rendezvous) and both ports are free, a collective when all members have called it. No clock is read, so
the answer is the same every time.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from allhands.events import P2P, Columns, Kind
from allhands.matching import NOBODY, Matching

_ISSUE, _WAIT = 0, 1
_ONE_MESSAGE = 1.0
Ports = tuple[int, ...]
Order = tuple[float, int, int]
"""When a transfer was ready; then its place in the program of its rank; then the rank: first come, first served."""


@dataclass(frozen=True)
class Timeline:
    """When each operation happened. NaN: never.

    `issued`, `began` (its data started to move), `ended`; `wait_began` and `wait_ended` of the first wait for it. In units of one message.
    """

    issued: np.ndarray
    began: np.ndarray
    ended: np.ndarray
    wait_began: np.ndarray
    wait_ended: np.ndarray
    rank: np.ndarray

    @cached_property
    def rounds(self) -> int:
        """How many steps of one message each the whole takes."""
        return int(max(self.rounds_of_ranks, default=0))

    @cached_property
    def rounds_of_ranks(self) -> list[int]:
        """The step in which each rank's last operation ends."""
        ended = np.nan_to_num(self.ended)
        return [int(ended[self.rank == rank].max(initial=0)) for rank in range(int(self.rank.max(initial=-1)) + 1)]


def replay(columns: Columns, matching: Matching) -> Timeline:
    """Go through a run with messages of one unit each."""
    return _Replay(columns, matching).timeline()


class _Replay:
    def __init__(self, columns: Columns, matching: Matching) -> None:
        self.columns, self.matching = columns, matching
        self.issued, self.began, self.ended, self.wait_began, self.wait_ended = (np.full(len(columns), np.nan) for _ in range(5))
        self.programs = list(_programs(columns))
        self.next_step = [0] * len(self.programs)
        self.waits_for: dict[int, int] = {}
        self.missing = {
            meeting: len(matching.members(meeting)) for meeting in range(matching.number_of_meetings)
        }  # members that have not come yet
        self.transfers: list[tuple[list[int], Ports, float]] = []
        self.is_busy = [False] * (2 * columns.world_size)
        self.parked: dict[int, list[tuple[Order, int]]] = defaultdict(list)
        self.ends: list[tuple[float, int]] = []
        self.startable: list[tuple[Order, int, int | None]] = []  # the last: the port that it queued at
        self.first = np.searchsorted(columns.rank, np.arange(columns.world_size))

    def timeline(self) -> Timeline:
        """The whole, until nothing can happen any more."""
        now = 0.0
        for program in range(len(self.programs)):
            self._go_on(program, now)
        self._start(now)
        while self.ends:
            now = self.ends[0][0]
            while self.ends and self.ends[0][0] == now:
                self._end(heapq.heappop(self.ends)[1], now)
            self._start(now)
        return Timeline(self.issued, self.began, self.ended, self.wait_began, self.wait_ended, self.columns.rank)

    def _go_on(self, program: int, now: float) -> None:
        """Go through a thread's steps until it has to wait."""
        steps = self.programs[program]
        while self.next_step[program] < len(steps):
            what, operation = steps[self.next_step[program]]
            if what == _ISSUE:
                self.issued[operation] = now
                self._issue(operation, now)
            else:
                self.wait_began[operation] = now
                if np.isnan(self.ended[operation]):
                    self.waits_for[operation] = program
                    return
                self.wait_ended[operation] = now
            self.next_step[program] += 1

    def _issue(self, operation: int, now: float) -> None:
        """A transfer is ready as soon as all its ends are issued."""
        kind = self.columns.kind[operation]
        if kind == Kind.COMPUTE:
            self.began[operation] = self.ended[operation] = now
        elif kind in P2P:
            other = int(self.matching.partner[operation])
            if other != NOBODY and not np.isnan(self.issued[other]):
                send, recv = (operation, other) if kind == Kind.SEND else (other, operation)
                ports = (2 * int(self.columns.rank[send]), 2 * int(self.columns.rank[recv]) + 1)
                self._ready([send, recv], ports, _ONE_MESSAGE, now)
        else:
            meeting = int(self.matching.meeting[operation])
            self.missing[meeting] -= 1
            if not self.missing[meeting]:
                ports = tuple(port for rank in self.matching.members(meeting) for port in (2 * rank, 2 * rank + 1))
                length = 0.0 if kind == Kind.NEW_GROUP else _ONE_MESSAGE
                self._ready(self.matching.calls(meeting), ports, length, now)

    def _ready(self, operations: list[int], ports: Ports, length: float, now: float) -> None:
        rank = int(self.columns.rank[operations[0]])
        order = (now, operations[0] - int(self.first[rank]), rank)
        heapq.heappush(self.startable, (order, len(self.transfers), None))
        self.transfers.append((operations, ports, length))

    def _start(self, now: float) -> None:
        """Start all that can start, in order; the others queue at a port that is busy."""
        while self.startable:
            order, transfer, queued_at = heapq.heappop(self.startable)
            operations, ports, length = self.transfers[transfer]
            busy = next((port for port in ports if self.is_busy[port]), None)
            if busy is not None:
                heapq.heappush(self.parked[busy], (order, transfer))
                if queued_at is not None and not self.is_busy[queued_at]:
                    self._wake_first(queued_at)
                continue
            for port in ports:
                self.is_busy[port] = True
            for operation in operations:
                self.began[operation] = now
            heapq.heappush(self.ends, (now + length, transfer))

    def _end(self, transfer: int, now: float) -> None:
        """Free the ports, and let those go on that waited for it."""
        operations, ports, _ = self.transfers[transfer]
        for port in ports:
            self.is_busy[port] = False
            self._wake_first(port)
        for operation in operations:
            self.ended[operation] = now
        for operation in operations:
            program = self.waits_for.pop(operation, None)
            if program is not None:
                self.wait_ended[operation] = now
                self.next_step[program] += 1
                self._go_on(program, now)

    def _wake_first(self, port: int) -> None:
        """The first that queues at a port may try again."""
        if self.parked[port]:
            heapq.heappush(self.startable, (*heapq.heappop(self.parked[port]), port))


def _programs(columns: Columns) -> Iterable[list[tuple[int, int]]]:
    """What each thread of each rank did: the steps in their order."""
    thread = columns.of_sites(site.thread % (1 << 62) for site in columns.sites)
    everything = np.arange(len(columns))
    waited = np.flatnonzero(columns.waited)
    operation = np.concatenate([everything, waited])
    what = np.concatenate([np.full(len(everything), _ISSUE), np.full(len(waited), _WAIT)])
    tick = np.concatenate([columns.issued, columns.waited[waited]])
    order = np.lexsort((tick, thread[operation], columns.rank[operation]))
    operation, what = operation[order], what[order]
    last = np.flatnonzero(np.diff(columns.rank[operation]) | np.diff(thread[operation])) + 1
    for steps in np.split(np.stack([what, operation], axis=1), last):
        yield [(int(what), int(operation)) for what, operation in steps]
