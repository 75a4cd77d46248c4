"""From the start of a run to its end: who is done, who failed and why, who is still at work and where."""

import json
import os
import selectors
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from allhands import forkserver, liveness, payload, rank, spawn
from allhands.errors import Failure, RankError, RankTimeout, RunInterrupted, root_cause, standing, standings
from allhands.interrupt import Interrupts
from allhands.job import RECORD, Job, News
from allhands.printed import LiveText, fold
from allhands.stack import Frame, from_faulthandler

_MAX_OUTPUT_BYTES = 1 << 28

_LOOK_SECONDS = 0.2  # how often the size of the printed text is looked at
_STREAM_SECONDS = 0.05  # how often it is shown, if it is shown live
_QUIET_SECONDS = 0.1  # for so long the other ranks do nothing after a failure: no more will come
_SETTLE_SECONDS = 3.0  # and if they go on working, wait for so long
_SETTLE_BLINDLY_SECONDS = 0.5  # or for so long, where nobody tells whether they work
_STACK_SECONDS = 2.0  # for ranks to say where they are
_STACK_SECONDS_AT_INTERRUPT = 0.25


@dataclass(frozen=True)
class Run:
    """What a run gave: `results` and `output` (the printed text) by rank."""

    results: list[Any]
    output: list[str]

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
        self.text = _PrintedText(self.job, self.stream)

    @property
    def _world_size(self) -> int:
        return self.job.world_size

    @property
    def _working(self) -> list[int]:
        return [r for r in range(self._world_size) if r not in self.done and r not in self.failures]

    def follow(self) -> Run:
        """Until all ranks are done. Whatever happens, what they printed is shown."""
        with self.selector, self.text:
            try:
                self._wait_for_start()
                deadline = time.monotonic() + self.job.timeout
                while self._working and not self.failures:
                    if time.monotonic() >= deadline:
                        raise self._with_output(RankTimeout(self._timeout_text()))
                    self._take_news(deadline - time.monotonic())
                if self.failures:
                    if not self.is_short_of_ranks:  # Else the others can only wait for those that never were.
                        self._settle()
                    raise self._with_output(RankError(root_cause(self.failures, self._world_size)))
                results = [self._result(r) for r in range(self._world_size)]
                if self.failures:
                    raise self._with_output(RankError(root_cause(self.failures, self._world_size, self.done)))
            except KeyboardInterrupt:
                if self.failures:  # It waited for the others to come to theirs.
                    raise self._with_output(RankError(root_cause(self.failures, self._world_size))) from None
                raise self._with_output(RunInterrupted(self._interrupt_text())) from None
            return Run(results, self.text.all())

    def _with_output(self, error: RankError | RunInterrupted) -> RankError | RunInterrupted:
        error.output = tuple(self.text.all())
        return error

    def _wait_for_start(self) -> None:
        """The time that the fork server takes to import torch is not the ranks' time."""
        while len(self.pids) < self._world_size and not self.is_short_of_ranks:
            self._take_news(_LOOK_SECONDS)

    def _take_news(self, seconds: float) -> None:
        """Wait so long at most for something to happen, and note it."""
        ready = self.selector.select(min(seconds, _STREAM_SECONDS if self.stream else _LOOK_SECONDS))
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
                self.failures.setdefault(r, Failure(f"printed more than {_MAX_OUTPUT_BYTES:,} bytes", hint=hint))
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
        frames = tuple(from_faulthandler(self._stack_text(r), rank.__file__) or ())
        if code == rank.CANNOT_REPORT:
            hint = "Its printed text tells why. Is there space left where temporary files go?"
            return Failure("could not write down what happened", (), hint)
        if code >= 0:
            return Failure(f"exited with code {code}", frames, "A rank ends by returning: os._exit() takes its result with it.")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Failure(f"died of {_DEATHS.get(name, name)}", frames, _DEATH_HINTS.get(name, ""))

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

    def _timeout_text(self) -> str:
        seconds = f"{self.job.timeout:g} second{'' if self.job.timeout == 1 else 's'}"
        if self.done:
            why = "Do they wait for one that had finished? A send needs a recv, and a collective every rank of its group."
        else:
            why = "Ranks that wait for each other wait for ever."
        return (
            f"Not finished after {seconds}.\n\n{self._standings(_STACK_SECONDS)}\n\n"
            f"{why}\nIf they were only slow, give them longer: timeout=60, or %%ranks 4 --timeout 60."
        )

    def _interrupt_text(self) -> str:
        return f"The run was stopped.\n\n{self._standings(_STACK_SECONDS_AT_INTERRUPT)}"

    def _standings(self, patience: float) -> str:
        """Where each rank stands, as far as they say it within `patience` seconds."""
        working = [r for r in self._working if r in self.pids]
        stacks: list[list[Frame] | None] = [None if r in working else [] for r in range(self._world_size)]
        before = {r: len(self._stack_text(r)) for r in working}
        try:
            self.ranks.ask_for_stacks()
        except OSError:
            working = []
        end = time.monotonic() + patience
        while working and time.monotonic() < end:
            time.sleep(0.01)
            for r in list(working):
                stacks[r] = from_faulthandler(self._stack_text(r)[before[r] :], rank.__file__)
                if stacks[r] is not None:
                    working.remove(r)
        return standings(["  had finished" if r in self.done else standing(stack, rank.DOING) for r, stack in enumerate(stacks)])

    def _stack_text(self, r: int) -> str:
        try:
            with open(self.job.path("stack", r)) as file:
                return file.read()
        except FileNotFoundError:
            return ""


_DEATHS = {
    "SIGSEGV": "a segmentation fault (SIGSEGV)",
    "SIGKILL": "SIGKILL",
    "SIGABRT": "an abort in a C++ library (SIGABRT)",
    "SIGBUS": "a bus error (SIGBUS)",
}
_DEATH_HINTS = {
    "SIGKILL": "Did memory run out? Linux then kills the largest process. Try smaller tensors or fewer ranks.",
    "SIGABRT": "What the library said is in the rank's printed text. Did two ranks disagree about the size of a message?",
}


def _write(text: str) -> None:
    """Show text; a terminal that lacks some of its characters gets them spelt out, and where there is no terminal there is nothing."""
    if sys.stdout is None or not text:
        return
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        sys.stdout.write(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))
    sys.stdout.flush()


class _PrintedText:
    """The files that the ranks print into, and what of them has been shown."""

    def __init__(self, job: Job, stream: bool) -> None:
        self.paths = [job.path("output", r) for r in range(job.world_size)]
        self.live = [LiveText(r) for r in range(job.world_size)] if stream else []
        self.shown_bytes = [0] * len(self.live)

    def __enter__(self) -> "_PrintedText":
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self._show_news(last=True)
        else:
            _write(fold(self.all()))

    def look(self) -> list[int]:
        """Show what is new, if it is shown live. Returns the ranks that have printed far too much."""
        if self.live:
            self._show_news(last=False)
        return [r for r, path in enumerate(self.paths) if os.path.exists(path) and os.path.getsize(path) > _MAX_OUTPUT_BYTES]

    def all(self) -> list[str]:
        """All that each rank has printed. Bytes that are not UTF-8 are spelt out."""
        return [self._read(path, 0).decode(errors="backslashreplace") for path in self.paths]

    def _show_news(self, last: bool) -> None:
        for r, live in enumerate(self.live):
            data = self._read(self.paths[r], self.shown_bytes[r])
            if not last:  # A character may be half written: take whole lines only.
                data = data[: data.rfind(b"\n") + 1]
            self.shown_bytes[r] += len(data)
            _write("".join(live.take(data.decode(errors="backslashreplace"), last)))

    @staticmethod
    def _read(path: str, start: int) -> bytes:
        try:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read()
        except FileNotFoundError:
            return b""
