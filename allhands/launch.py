"""`run(fn, world_size=4)`: start the ranks, watch them, gather what they return in rank order, or raise the root cause."""

import inspect
import json
import operator
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allhands import forkserver, liveness, payload, rank, spawn
from allhands.cell import Cell
from allhands.errors import Failure, RankError, RankTimeout, RunInterrupted, root_cause, standings
from allhands.job import RECORD, Job, News
from allhands.printed import LiveText, fold
from allhands.stack import Frame, from_faulthandler

MAX_WORLD_SIZE = 128
_MAX_OUTPUT_BYTES = 1 << 30

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


def run(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 4,
    timeout: float = 30.0,
    seed: int = 0,
    stream: bool = False,
) -> Run:
    """Call `fn(*args)` in `world_size` new processes that share a process group, and wait for them.

    `fn` may come from anywhere, a notebook cell too; it learns its rank from `dist.get_rank()`. Each rank has its own
    copy of `args` and of the variables that `fn` uses, and a random seed of its own (made from `seed`). What it returns must be picklable.
    What the ranks print is shown in rank order at the end, or line by line as it comes with `stream=True`.

    Raises `RankError` with the root cause if a rank fails, `RankTimeout` with where each rank stands after `timeout`
    seconds (math.inf: never), and `TypeError` or `ValueError`, before anything is started, for arguments that make no sense.
    """
    world_size = _check_world_size(world_size)
    _check_call(fn, args)
    seconds = _check_timeout(timeout)
    if not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, but is {seed!r}")
    if rank.current is not None:
        raise RuntimeError(
            f"run() was called in rank {rank.current[0]} of {rank.current[1]}: ranks cannot have ranks of their own. "
            "Call it in the notebook or script"
        )
    try:
        return _run(_prepare(fn, args, world_size, seconds, seed), stream)
    except forkserver.ServerGoneError as error:
        if error.has_begun:
            raise
    return _run(_prepare(fn, args, world_size, seconds, seed), stream)  # The server had been killed since the last run.


def _run(job: Job, stream: bool) -> Run:
    try:
        ranks = forkserver.server.start(job) if forkserver.is_possible else spawn.SpawnedRanks(job)
    except BaseException:
        shutil.rmtree(job.directory, ignore_errors=True)
        raise
    try:
        return _Watch(job, ranks, stream).follow()
    finally:
        ranks.end()


# --- before the start: what the caller may have got wrong ---------------------------------------------------------


def _check_world_size(world_size: Any) -> int:
    try:
        number = operator.index(world_size)
    except TypeError:
        number = None
    if number is None or isinstance(world_size, bool):
        raise TypeError(f"world_size must be a whole number, but is {world_size!r}")
    if not 1 <= number <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size must be from 1 to {MAX_WORLD_SIZE}, but is {number:,}")
    return number


def _check_timeout(timeout: Any) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds (math.inf: no limit), but is {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, but is {timeout!r}")
    return float(timeout)


def _check_call(fn: Any, args: tuple[Any, ...]) -> None:
    if not callable(fn):
        raise TypeError(
            f"run needs a function to call in each rank, but got {type(fn).__name__} {str(fn)[:60]!r}. Write run(fn, x), not run(fn(x))"
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # Some functions written in C do not say.
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", "fn")
        given = f"the {len(args)} arguments" if len(args) != 1 else "the one argument"
        raise TypeError(
            f"{name}{signature} cannot be called with {given} that run was given ({error}). "
            f"Write run({name}, {', '.join(signature.parameters) or 'world_size=4'}); "
            "a rank learns its number from dist.get_rank() and how many there are from dist.get_world_size()"
        ) from None


def _prepare(fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout: float, seed: int) -> Job:
    """Put all that the ranks need into a folder that only this user can read."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError("the working directory does not exist any more: os.chdir() to one that does") from None
    directory = tempfile.mkdtemp(prefix="allhands-")
    try:
        job = Job(world_size, directory, seed, timeout, dict(os.environ), here, tuple(sys.path))
        try:
            payload.save(job.path("work"), (fn, args))
        except OSError:
            raise
        except Exception as error:
            raise TypeError(_why_unsendable(fn, args) or f"the function cannot be sent to the ranks: {error}") from None
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return job


def _why_unsendable(fn: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    parts = [*fn.variables.items()] if isinstance(fn, Cell) else [(getattr(fn, "__name__", "the function"), fn)]
    parts += [(f"argument {number}", arg) for number, arg in enumerate(args, start=1)]
    return next((why for name, part in parts if (why := payload.why_unpicklable(part, name))), None)


# --- from the start to the end ------------------------------------------------------------------------------------


@dataclass
class _Watch:
    """The caller's view of a run: who is done, who failed, who is still at work."""

    job: Job
    ranks: Any
    stream: bool
    pids: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    failures: dict[int, Failure] = field(default_factory=dict)
    unread: bytes = b""

    def __post_init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.ranks.socket, selectors.EVENT_READ)
        self.text = _PrintedText(self.job, self.stream)

    @property
    def world_size(self) -> int:
        return self.job.world_size

    @property
    def working(self) -> list[int]:
        return [r for r in range(self.world_size) if r not in self.done and r not in self.failures]

    def follow(self) -> Run:
        """Until all ranks are done. Whatever happens, what they printed is shown."""
        with self.selector, self.text:
            try:
                self.wait_for_start()
                deadline = time.monotonic() + self.job.timeout
                while self.working and not self.failures:
                    if time.monotonic() >= deadline:
                        raise self.with_output(RankTimeout(self.timeout_text()))
                    self.take_news(deadline - time.monotonic())
                if self.failures:
                    self.settle()
                    raise self.with_output(RankError(root_cause(self.failures, self.world_size)))
                results = [self.result(r) for r in range(self.world_size)]
            except KeyboardInterrupt:
                raise self.with_output(RunInterrupted(self.interrupt_text())) from None
            return Run(results, self.text.all())

    def with_output(self, error: RankError | RunInterrupted) -> RankError | RunInterrupted:
        error.output = tuple(self.text.all())
        return error

    def wait_for_start(self) -> None:
        """The time that the fork server takes to import torch is not the ranks' time."""
        while len(self.pids) < self.world_size and not self.failures:
            self.take_news(_LOOK_SECONDS)

    def take_news(self, seconds: float) -> None:
        """Wait so long at most for something to happen, and note it."""
        if self.selector.select(min(seconds, _STREAM_SECONDS if self.stream else _LOOK_SECONDS)):
            self.unread += self.ranks.read()
            whole = len(self.unread) // RECORD.size * RECORD.size
            for what, r, number in RECORD.iter_unpack(self.unread[:whole]):
                self.note(News(what), r, number)
            self.unread = self.unread[whole:]
        for what, r, number in self.ranks.poll():
            self.note(what, r, number)
        for r in self.text.look():
            self.failures.setdefault(
                r, Failure(f"printed more than {_MAX_OUTPUT_BYTES:,} bytes", hint="Is there a print in an endless loop?")
            )

    def note(self, what: News, r: int, number: int) -> None:
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
            hint = "Try fewer ranks: the system gives no more processes or memory."
            self.failures[r] = Failure(f"could not be started ({os.strerror(number)})", hint=hint)
        elif what is News.EXITED and (r in self.done or r not in self.failures):
            self.done.discard(r)
            self.failures[r] = self.death(r, number)

    def death(self, r: int, code: int) -> Failure:
        """A rank's process has ended by itself, which it never does when all is well."""
        frames = tuple(from_faulthandler(self.stack_text(r), rank.__file__) or ())
        if code >= 0:
            return Failure(
                f"ended its process (exit code {code})", frames, "A rank ends by returning: os._exit() takes its result with it."
            )
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Failure(f"was ended by {_DEATHS.get(name, name)}", frames, _DEATH_HINTS.get(name, ""))

    def settle(self) -> None:
        """After a failure, let the other ranks come to theirs, so that the text does not depend on who was faster."""
        end = time.monotonic() + (_SETTLE_SECONDS if liveness.can_tell else _SETTLE_BLINDLY_SECONDS)
        quiet = liveness.Quiet()
        while self.working and time.monotonic() < end:
            self.take_news(_QUIET_SECONDS / 5)
            if liveness.can_tell and quiet.seconds(self.pids[r] for r in self.working) >= _QUIET_SECONDS:
                return

    def result(self, r: int) -> Any:
        path = self.job.path("result", r)
        try:
            value = payload.load(path)
        except Exception as error:
            failure = Failure(f"returned what cannot be unpickled here ({type(error).__name__}: {error})")
            raise self.with_output(RankError(root_cause({r: failure}, self.world_size))) from error
        os.unlink(path)
        return value

    def timeout_text(self) -> str:
        seconds = f"{self.job.timeout:g} second{'' if self.job.timeout == 1 else 's'}"
        return (
            f"Not finished after {seconds}.\n\n{self.standings(_STACK_SECONDS)}\n\n"
            "Ranks that wait for each other wait for ever. If this was only slow, give it more with timeout=…"
        )

    def interrupt_text(self) -> str:
        return f"The run was stopped.\n\n{self.standings(_STACK_SECONDS_AT_INTERRUPT)}"

    def standings(self, patience: float) -> str:
        """Where each rank stands, as far as they say it within `patience` seconds."""
        working = [r for r in self.working if r in self.pids]
        stacks: list[list[Frame] | None] = [None if r in working else [] for r in range(self.world_size)]
        before = {r: len(self.stack_text(r)) for r in working}
        try:
            self.ranks.ask_for_stacks()
        except OSError:
            working = []
        end = time.monotonic() + patience
        while working and time.monotonic() < end:
            time.sleep(0.01)
            for r in list(working):
                stacks[r] = from_faulthandler(self.stack_text(r)[before[r] :], rank.__file__)
                if stacks[r] is not None:
                    working.remove(r)
        return standings(stacks, self.done | self.failures.keys())

    def stack_text(self, r: int) -> str:
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


class _PrintedText:
    """The files that the ranks print into, and what of them has been shown."""

    def __init__(self, job: Job, stream: bool) -> None:
        self.paths = [job.path("output", r) for r in range(job.world_size)]
        self.live = [LiveText(r) for r in range(job.world_size)] if stream else []
        self.shown_bytes = [0] * len(self.live)
        self.is_shown = False

    def __enter__(self) -> "_PrintedText":
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self._show_news(last=True)
        else:
            sys.stdout.write(fold(self.all()))

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
            sys.stdout.write("".join(live.take(data.decode(errors="backslashreplace"), last)))
        sys.stdout.flush()

    @staticmethod
    def _read(path: str, start: int) -> bytes:
        try:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read()
        except FileNotFoundError:
            return b""
