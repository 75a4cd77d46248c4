"""`run(fn, world_size=4)`: start the ranks, watch them, gather what they return in rank order, or raise the root cause."""

import inspect
import operator
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle

from allhands import forkserver, payload, rank, spawn
from allhands.cell import Cell
from allhands.errors import without_traceback
from allhands.interrupt import Interrupts
from allhands.job import COMPUTE, Job
from allhands.watch import Run, Watch

MAX_WORLD_SIZE = 128


def run(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 4,
    timeout: float = 30.0,
    record: bool | str = True,
    seed: int = 0,
    stream: bool = False,
) -> Run:
    """Call `fn(*args)` in `world_size` new processes that share a process group, and wait for them.

    `fn` may come from anywhere, a notebook cell too; it learns its rank from `dist.get_rank()`. Each rank has its own
    copy of `args` and of the variables that `fn` uses, and a random seed of its own (made from `seed`). What it returns must be picklable.
    What the ranks print is shown in rank order at the end, or line by line as it comes with `stream=True`.

    Returns a `Run`: `.results` and `.output` hold what each rank returned and printed.

    Raises `RankError` with the root cause if a rank fails, `RankTimeout` with where each rank stands after `timeout`
    seconds (math.inf: never), and `TypeError` or `ValueError`, before anything is started, for arguments that make no sense.
    """
    with Interrupts() as interrupts:
        job = _prepare(fn, args, world_size, timeout, seed, record)
        try:
            return _run(job, stream, interrupts)
        except forkserver.ServerGoneError as error:
            if error.has_begun:
                raise
        # The server had been killed since the last run.
        return _run(_prepare(fn, args, world_size, timeout, seed, record), stream, interrupts)


def _run(job: Job, stream: bool, interrupts: Interrupts) -> Run:
    try:
        ranks = forkserver.server.start(job) if forkserver.is_possible else spawn.SpawnedRanks(job)
    except BaseException:
        shutil.rmtree(job.directory, ignore_errors=True)
        raise
    try:
        return Watch(job, ranks, stream, interrupts).follow()
    finally:
        ranks.end()


# --- before the start: what the caller may have got wrong ---------------------------------------------------------


def _prepare(fn: Any, args: tuple[Any, ...], world_size: Any, timeout: Any, seed: Any, record: Any) -> Job:
    """Check the arguments, and put all that the ranks need into a folder that only this user can read."""
    try:
        if rank.current is not None:
            raise RuntimeError(
                f"run() was called in rank {rank.current[0]} of {rank.current[1]}: ranks cannot have ranks of their own. "
                "Call it in the notebook or script"
            )
        number, seconds, seed = _check_world_size(world_size), _check_timeout(timeout), _whole_number("seed", seed)
        _check_record(record)
        _check_call(fn, args)
        return _pack(fn, args, partial(Job, number, seed=seed, timeout=seconds, record=record))
    except (TypeError, ValueError, RuntimeError) as error:
        without_traceback(error)
        raise


def _whole_number(name: str, value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be a whole number, but is {value!r}")


def _check_world_size(world_size: Any) -> int:
    number = _whole_number("world_size", world_size)
    if not 1 <= number <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size must be from 1 to {MAX_WORLD_SIZE}, but is {number:,}")
    return number


def _check_timeout(timeout: Any) -> float:
    try:
        seconds = None if isinstance(timeout, str | bool) else float(timeout)
    except (TypeError, ValueError, OverflowError):
        seconds = None
    if seconds is None:
        raise TypeError(f"timeout must be a number of seconds (math.inf: no limit), but is {str(timeout)[:60]!r}")
    if not seconds > 0:
        raise ValueError(f"timeout must be more than 0 seconds, but is {timeout!r}")
    return seconds


def _check_record(record: Any) -> None:
    if record not in (True, False, COMPUTE):
        raise ValueError(f"record must be True, False or {COMPUTE!r} (which counts every operator too), but is {record!r}")


def _check_call(fn: Any, args: tuple[Any, ...]) -> None:
    if not callable(fn):
        raise TypeError(
            f"run needs a function to call in each rank, but got {type(fn).__name__} {str(fn)[:60]!r}. "
            "Write run(fn) or run(fn, x), not run(fn()) or run(fn(x))"
        )
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # Some functions written in C do not say.
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(_why_uncallable(getattr(fn, "__name__", "fn"), signature, len(args), str(error))) from None


def _why_uncallable(name: str, signature: inspect.Signature, given: int, error: str) -> str:
    told = f"{name}{signature} cannot be called with {given} argument{'' if given == 1 else 's'}: {error}. "
    named_by_us = [parameter for parameter in signature.parameters if parameter in ("rank", "world_size")]
    rest = [str(parameter) for parameter in signature.parameters.values() if parameter.name not in named_by_us]
    call = f"run({', '.join([name, *rest])}, world_size=4)"
    if named_by_us:
        calls = {"rank": "rank = dist.get_rank()", "world_size": "world_size = dist.get_world_size()"}
        begin = "; ".join(calls[parameter] for parameter in named_by_us)
        return f"{told}Take {' and '.join(named_by_us)} out of its brackets, begin it with {begin}, and call {call}"
    return f"{told}Its arguments go by position, and the number of ranks by name: {call}"


def _pack(fn: Callable[..., Any], args: tuple[Any, ...], make_job: Callable[..., Job]) -> Job:
    if "__mp_main__" in sys.modules:  # What a spawned process calls its __main__, nobody else can import.
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
    try:
        return _write(fn, args, make_job)
    except OSError:
        raise
    except Exception as error:
        # A variable that cannot be sent may stay here if the cell sets it anyway: `with open(path) as f`.
        stays = (
            {name for name, value in fn.variables.items() if name in fn.sets and payload.pickling_error(value)}
            if isinstance(fn, Cell)
            else None
        )
        if stays:
            return _pack(fn.without(stays), args, make_job)
        raise TypeError(_why_unsendable(fn, args) or f"the function cannot be sent to the ranks: {error}") from None


def _write(fn: Callable[..., Any], args: tuple[Any, ...], make_job: Callable[..., Job]) -> Job:
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError("the working directory does not exist any more: os.chdir() to one that does") from None
    directory = tempfile.mkdtemp(prefix="allhands-")
    try:
        job = make_job(directory=directory, environment=dict(os.environ), working_directory=here, import_path=tuple(sys.path))
        payload.save(job.path("work"), (fn, args))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return job


def _why_unsendable(fn: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    parts = [*fn.variables.items()] if isinstance(fn, Cell) else [(getattr(fn, "__name__", "the function"), fn)]
    parts += [(f"argument {number}", arg) for number, arg in enumerate(args, start=1)]
    return next((why for name, part in parts if (why := payload.why_unpicklable(part, name))), None)
