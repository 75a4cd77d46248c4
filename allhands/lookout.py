"""The parent's lookout: while ranks run it reads what they write down, and says when some of them can never go on."""

import os
import time
from collections.abc import Collection, Iterable
from typing import BinaryIO

import numpy as np
import torch

from allhands import liveness
from allhands.deadlock import Deadlock, find_deadlock
from allhands.events import Kind, RankFile, tick_of
from allhands.job import STACK_SIGNAL, Job
from allhands.matching import NOBODY
from allhands.mismatch import Mismatch
from allhands.stacks import Stacks, main_thread, number_of_threads
from allhands.trace import Trace

LOOK_SECONDS = 0.04
_SETTLE_SECONDS = 0.3  # for ranks that may still come to wait for the same, so that the text is the same every time
_LOST_SECONDS = 1.0  # a message that was let go of, and has not come for so long, will not come
_STACK_SECONDS = 0.3
_SHARE_OF_TIME = 0.1  # of a processor that judging may take
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Lookout:
    """Looks at the ranks of one run again and again."""

    def __init__(self, job: Job, stacks: Stacks) -> None:
        self.job = job
        self._stacks = stacks
        self._files: dict[int, BinaryIO] = {}
        self._ticks = [0] * job.world_size
        self._since = [time.monotonic()] * job.world_size
        self._judged: tuple[object, ...] = ()
        self._next = 0.0
        self._quiet = {r: liveness.Quiet() for r in range(job.world_size)}

    def __enter__(self) -> "Lookout":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def trace(self) -> Trace:
        """What is written down by now."""
        ranks = range(self.job.world_size)
        return Trace([RankFile.read(self.job.path("rows", r), self.job.path("tables", r)) for r in ranks])

    def look(self, done: Collection[int], pids: dict[int, int]) -> "tuple[Trace, Deadlock | Mismatch] | None":
        """A deadlock, or two ends that do not fit and hang, if that can be proved now. `done`: the ranks that have finished."""
        now = time.monotonic()
        self._read_ticks(now)
        still = [r for r in range(self.job.world_size) if now - self._since[r] >= LOOK_SECONDS]
        state = (tuple(done), *((r, self._ticks[r]) for r in still))
        if now < self._next or not still or state == self._judged:
            return None
        before = time.thread_time()
        found, is_final = self._judge(still, set(done), pids, now)
        if is_final:
            self._judged = state
        self._next = time.monotonic() + (time.thread_time() - before) / _SHARE_OF_TIME
        return found

    def _read_ticks(self, now: float) -> None:
        for r in range(self.job.world_size):
            if r not in self._files:
                try:
                    self._files[r] = open(self.job.path("rows", r), "rb", buffering=0)
                except FileNotFoundError:  # It has not begun.
                    continue
            tick = tick_of(self._files[r])
            if tick != self._ticks[r]:
                self._ticks[r], self._since[r] = tick, now

    def _judge(
        self, still: list[int], done: set[int], pids: dict[int, int], now: float
    ) -> "tuple[tuple[Trace, Deadlock | Mismatch] | None, bool]":
        """What is found; and whether that is all that can be found as long as nothing moves."""
        trace = self.trace()
        waiting = {*trace.columns.rank[trace.columns.is_waiting].tolist()}
        maybe_silent = [r for r in still if r not in waiting and r not in done and self._has_begun_in_vain(trace, r)]
        if not waiting and not maybe_silent:
            return None, True
        mismatch = trace.mismatch
        if mismatch and any(trace.columns.is_waiting[end] and not trace.columns.has_limit[end] for end in mismatch.ends):
            ranks = [int(trace.columns.rank[end]) for end in mismatch.ends]
            return ((trace, mismatch) if self._has_settled(ranks, now) else None), False
        moving = [r for r in range(self.job.world_size) if r not in still]
        trace.columns.is_waiting[np.isin(trace.columns.rank, moving)] = False
        lost = self._maybe_lost(trace)
        is_late = all(now - self._since[int(trace.columns.rank[end])] >= _LOST_SECONDS for end in lost)
        deadlock = find_deadlock(trace.columns, trace.matching, done, maybe_silent, lost if is_late else ())
        if deadlock is None:
            return None, is_late
        all_wait = not moving and len(waiting | done) == self.job.world_size
        asleep = {r for r in maybe_silent if r in pids and liveness.can_tell and self._quiet[r].seconds([pids[r]]) >= LOOK_SECONDS}
        if not (all_wait or self._has_settled(deadlock.ranks, now)) or not self._holds(deadlock, trace, done, asleep):
            return None, False
        return (trace, deadlock), True

    def _has_settled(self, ranks: Iterable[int], now: float) -> bool:
        return all(now - self._since[r] >= _SETTLE_SECONDS for r in ranks)

    @staticmethod
    def _maybe_lost(trace: Trace) -> list[int]:
        """The receives that are waited for, and whose send was let go of."""
        waiting = np.flatnonzero(trace.columns.is_waiting & (trace.columns.kind == Kind.RECV) & (trace.matching.partner != NOBODY))
        return [recv for recv in waiting.tolist() if trace.columns.was_let_go[trace.matching.partner[recv]]]

    @staticmethod
    def _has_begun_in_vain(trace: Trace, r: int) -> bool:
        """Whether a rank has begun a collective that not all have called, and has not waited for it yet."""
        mine = np.flatnonzero((trace.columns.rank == r) & (trace.columns.waited == 0) & (trace.matching.meeting != NOBODY))
        meetings = {int(trace.matching.meeting[operation]) for operation in mine}
        return any(len(trace.matching.calls(meeting)) < len(trace.matching.members(meeting)) for meeting in meetings)

    def _holds(self, deadlock: Deadlock, trace: Trace, done: set[int], asleep: set[int]) -> bool:
        """No rank of the proof has another thread that might still help, and nobody has moved meanwhile.

        `asleep`: those that do nothing, of the ranks that have not asked to wait. They have to wait inside of torch, unless what they
        have begun can never end, whatever they do.
        """
        threads_of = {r: {trace.matching.site(place).thread for place in self._waits_of(trace, r)} for r in deadlock.ranks}
        needs_finished = {each.rank for each in deadlock.stuck if set(each.needs) <= done}
        silent = {r for r in deadlock.ranks if r not in done and not threads_of[r] and r not in needs_finished}
        if not silent <= asleep:
            return False
        if STACK_SIGNAL is not None:
            told = self._stacks.ask(deadlock.ranks, _STACK_SECONDS)
            if len(told) < len(deadlock.ranks):
                return False
            if any(number_of_threads(told[r]) > max(1, len(threads_of[r])) for r in deadlock.ranks):
                return False
            if not all(_is_in_torch(told[r]) for r in silent):
                return False
        return all(tick_of(self._files[r]) == self._ticks[r] for r in deadlock.ranks if r in self._files)

    @staticmethod
    def _waits_of(trace: Trace, r: int) -> list[int]:
        return np.flatnonzero(trace.columns.is_waiting & (trace.columns.rank == r)).tolist()


def _is_in_torch(stack: str) -> bool:
    frames = main_thread(stack)
    return bool(frames) and frames[-1].filename.startswith(_TORCH)
