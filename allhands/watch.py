"""From the start of a run to its end: who is done, who failed and why, who is still at work and where."""

import json
import os
import selectors
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from allhands import forkserver, liveness, payload, rank, spawn
from allhands.afterwards import finding, warnings_of
from allhands.deadlock import Deadlock, find_deadlock
from allhands.errors import (
    Failure,
    RankDeadlock,
    RankError,
    RankTimeout,
    Recorded,
    RunInterrupted,
    root_cause,
    standing,
    standings,
)
from allhands.interrupt import Interrupts
from allhands.job import RECORD, Job, News
from allhands.lookout import LOOK_SECONDS, Lookout
from allhands.output import MAX_OUTPUT_BYTES, PrintedText, write
from allhands.printed import fold
from allhands.stack import Frame
from allhands.stacks import Stacks, main_thread
from allhands.trace import Trace

_LOOK_SECONDS = 0.2  # how often the size of the printed text is looked at
_STREAM_SECONDS = 0.05  # how often it is shown, if it is shown live
_QUIET_SECONDS = 0.1  # for so long the other ranks do nothing after a failure: no more will come
_SETTLE_SECONDS = 3.0  # and if they go on working, wait for so long
_SETTLE_BLINDLY_SECONDS = 0.5  # or for so long, where nobody tells whether they work
_STACK_SECONDS = 2.0  # for ranks to say where they are
_STACK_SECONDS_AT_INTERRUPT = 0.25


@dataclass(frozen=True)
class Run(Recorded):
    """What a run gave: `results` and `output` (the printed text) by rank, and `trace`, the record of all that the ranks did.

    `warnings`: what was odd, and is printed after the ranks' own text: a message that nobody received, or that was not waited for.
    """

    results: list[Any]
    output: list[str]
    recorded: Trace | None = None
    warnings: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.results)

    def __repr__(self) -> str:
        return fold([repr(result) for result in self.results]).removesuffix("\n")


@dataclass
class Watch:
    """The caller's view of a run: who is done, who failed, who is still at work."""

    job: Job
    ranks: forkserver.ForkedRanks | spawn.SpawnedRanks
    stream: bool
    interrupts: Interrupts
    pids: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    failures: dict[int, Failure] = field(default_factory=dict)
    unread: bytes = b""
    is_short_of_ranks: bool = False

    def __post_init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.ranks.socket, selectors.EVENT_READ)
        self.selector.register(self.interrupts.socket, selectors.EVENT_READ)
        self.text = PrintedText(self.job, self.stream)
        self.stacks = Stacks(self.job, self.ranks)
        self.lookout = Lookout(self.job, self.stacks)

    @property
    def _world_size(self) -> int:
        return self.job.world_size

    @property
    def _working(self) -> list[int]:
        return [r for r in range(self._world_size) if r not in self.done and r not in self.failures]

    def follow(self) -> Run:
        """Until all ranks are done. Whatever happens, what they printed is shown."""
        warnings: tuple[str, ...] = ()
        try:
            with self.selector, self.lookout, self.text:
                self._wait_until_done()
                trace = self._trace()
                if trace is not None:
                    found = finding(trace)
                    if found:
                        raise self._with_output(RankError(found), trace)
                    warnings = warnings_of(trace)
                results = [self._result(r) for r in range(self._world_size)]
                if self.failures:
                    raise self._with_output(RankError(root_cause(self.failures, self._world_size, self.done)), trace)
            return Run(results, self.text.all(), trace, warnings)
        finally:
            write("".join(f"Warning: {warning}\n" for warning in warnings))

    def _wait_until_done(self) -> None:
        """Until all ranks have finished; raises what keeps them from it."""
        try:
            self._wait_for_start()
            deadline = time.monotonic() + self.job.timeout
            while self._working and not self.failures:
                if time.monotonic() >= deadline:
                    raise self._timeout(self._trace())
                self._take_news(deadline - time.monotonic())
                self._look_out()
            if self.failures:
                if not self.is_short_of_ranks:  # Else the others can only wait for those that never were.
                    self._settle()
                raise self._failure()
        except KeyboardInterrupt:
            if self.failures:  # It waited for the others to come to theirs.
                raise self._failure() from None
            raise self._with_output(RunInterrupted(self._interrupt_text()), self._trace()) from None

    def _look_out(self) -> None:
        """Raise what can be proved while ranks still run."""
        found = self.lookout.look(self.done, self.pids) if self.job.record and not self.failures else None
        if found is not None:
            trace, why = found
            if isinstance(why, Deadlock):
                before = f"{trace.mismatch.text}\n\nAnd then: " if trace.mismatch else ""
                error: RankError = RankDeadlock(before + why.text)
                error.deadlock = why
            else:
                error = RankError(why.text)
            raise self._with_output(error, trace)

    def _trace(self) -> Trace | None:
        return self.lookout.trace() if self.job.record else None

    def _failure(self) -> RankError:
        trace = self._trace()
        return self._with_output(RankError(self._failure_text(trace)), trace)

    def _failure_text(self, trace: Trace | None) -> str:
        """Why ranks failed. Two ends that did not fit come first: what happened then may be no more than their consequence."""
        if trace is None or trace.mismatch is None:
            return root_cause(self.failures, self._world_size)
        own = {r: failure for r, failure in self.failures.items() if not failure.is_consequence and failure.what != _ABORTED}
        if own:
            return f"{trace.mismatch.text}\n\nAnd then: {root_cause(own, self._world_size, self.done)}"
        self.text.hide_last_words()
        return trace.mismatch.text

    def _with_output(self, error: RankError | RunInterrupted, trace: Trace | None) -> RankError | RunInterrupted:
        error.output = tuple(self.text.all())
        error.recorded = trace
        return error

    def _wait_for_start(self) -> None:
        """The time that the fork server takes to import torch is not the ranks' time."""
        while len(self.pids) < self._world_size and not self.is_short_of_ranks:
            self._take_news(_LOOK_SECONDS)

    def _take_news(self, seconds: float) -> None:
        """Wait so long at most for something to happen, and note it."""
        often = LOOK_SECONDS if self.job.record else _STREAM_SECONDS if self.stream else _LOOK_SECONDS
        ready = self.selector.select(min(seconds, often))
        self.interrupts.check()
        if ready:
            self.unread += self.ranks.read()
            whole = len(self.unread) // RECORD.size * RECORD.size
            for what, r, number in RECORD.iter_unpack(self.unread[:whole]):
                self._note(News(what), r, number)
            self.unread = self.unread[whole:]
        else:
            for r in self.text.look():
                hint = "Is there a print in an endless loop?"
                self.failures.setdefault(r, Failure(f"printed more than {MAX_OUTPUT_BYTES:,} bytes", hint=hint))
        for what, r, number in self.ranks.poll():
            self._note(what, r, number)

    def _note(self, what: News, r: int, number: int) -> None:
        if what is News.STARTED:
            self.pids[r] = number
        elif what is News.DONE:
            self.done.add(r)
        elif what is News.FAILED:
            with open(self.job.path("failure", r)) as file:
                told = json.load(file)
            told["frames"] = tuple(Frame(*frame) for frame in told["frames"])
            self.failures.setdefault(r, Failure(**told))
        elif what is News.NOT_STARTED:
            self.is_short_of_ranks = True
            hint = "Try fewer ranks: the system gives no more processes or memory."
            self.failures[r] = Failure(f"could not be started ({os.strerror(number)})", hint=hint)
        elif what is News.EXITED and (r in self.done or r not in self.failures):
            self.done.discard(r)
            self.failures[r] = self._death(r, number)

    def _death(self, r: int, code: int) -> Failure:
        """A rank's process has ended by itself, which it never does when all is well."""
        frames = tuple(main_thread(self.stacks.text(r)) or ())
        if code == rank.CANNOT_REPORT:
            hint = "Its printed text tells why. Is there space left where temporary files go?"
            return Failure("could not write down what happened", (), hint)
        if code >= 0:
            return Failure(f"exited with code {code}", frames, "A rank ends by returning: os._exit() takes its result with it.")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Failure(_death_text(name), frames, _DEATH_HINTS.get(name, ""))

    def _settle(self) -> None:
        """After a failure, let the other ranks come to theirs, so that the text does not depend on who was faster."""
        end = time.monotonic() + (_SETTLE_SECONDS if liveness.can_tell else _SETTLE_BLINDLY_SECONDS)
        quiet = liveness.Quiet()
        while self._working and time.monotonic() < end:
            self._take_news(_QUIET_SECONDS / 5)
            if liveness.can_tell and quiet.seconds(self.pids[r] for r in self._working) >= _QUIET_SECONDS:
                return

    def _result(self, r: int) -> Any:
        self.interrupts.check()
        path = self.job.path("result", r)
        try:
            return payload.load(path)
        except Exception as error:
            self.failures[r] = Failure(f"returned what cannot be unpickled here ({type(error).__name__}: {error})")
        finally:
            os.unlink(path)

    def _timeout(self, trace: Trace | None) -> RankError:
        seconds = f"{self.job.timeout:g} second{'' if self.job.timeout == 1 else 's'}"
        deadlock = trace and find_deadlock(trace.columns, trace.matching, self.done)
        if deadlock:  # It was not proved: they have threads that might have helped.
            why = deadlock.why
        elif self.done:
            why = "Do they wait for one that had finished? A send needs a recv, and a collective every rank of its group."
        else:
            why = "Ranks that wait for each other wait for ever."
        standings = self._standings(_STACK_SECONDS)
        error = RankTimeout(
            f"Not finished after {seconds}.\n\n{standings}\n\n"
            f"{why}\nIf they were only slow, give them longer: timeout=60, or %%ranks 4 --timeout 60."
        )
        error.standings = standings
        return self._with_output(error, trace)

    def _interrupt_text(self) -> str:
        return f"The run was stopped.\n\n{self._standings(_STACK_SECONDS_AT_INTERRUPT)}"

    def _standings(self, patience: float) -> str:
        """Where each rank stands, as far as they say it within `patience` seconds."""
        told = self.stacks.ask([r for r in self._working if r in self.pids], patience)
        stands = {r: standing(main_thread(told[r]) if r in told else None, rank.DOING) for r in self._working}
        return standings([stands.get(r, "  had finished") for r in range(self._world_size)])


def _death_text(signal_name: str) -> str:
    return f"died of {_DEATHS.get(signal_name, signal_name)}"


_DEATHS = {
    "SIGSEGV": "a segmentation fault (SIGSEGV)",
    "SIGKILL": "SIGKILL",
    "SIGABRT": "an abort in a C++ library (SIGABRT)",
    "SIGBUS": "a bus error (SIGBUS)",
}
_ABORTED = _death_text("SIGABRT")
_DEATH_HINTS = {
    "SIGKILL": "Did memory run out? Linux then kills the largest process. Try smaller tensors or fewer ranks.",
    "SIGABRT": "What the library said is in the rank's printed text. Did two ranks disagree about the size of a message?",
}
