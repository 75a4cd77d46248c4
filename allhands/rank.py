"""One rank's process, from birth to exit.

It takes on the caller's environment, sends all that is printed to a file, joins the process group, calls the function, leaves
the result or the failure in a file, rings, and then *stays*: gloo ends the legal messages of others when one of their peers leaves.
"""

import builtins
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import random
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, NoReturn

import numpy.random  # numpy leaves it for later, and later is 10 ms in every rank
import torch
import torch.distributed as dist

from allhands import loopback, payload, pen, recorder
from allhands.cell import CellValue
from allhands.compute import Counting
from allhands.job import COMPUTE, RECORD, STACK_SIGNAL, Job, News
from allhands.report import OUT_OF_MEMORY, UnpicklableResult, report

# The parent's own time-out comes first: gloo's is there only for the day that the parent is gone.
_GLOO_SPARE_SECONDS = 60.0
_GLOO_LONGEST_SECONDS = 7 * 24 * 3600.0
_FILES_WITH_BUFFERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
CANNOT_REPORT = 86  # the exit code of a rank that could leave neither result nor failure

current: "tuple[int, int] | None" = None
"""The rank and the world size of this process, if it is a rank."""


def main(job: Job, rank: int, doorbell: socket.socket) -> NoReturn:
    """Be rank `rank` of `job`. Never returns: the parent ends the process when it has all that it wants."""
    born_of = os.getppid()
    try:
        _take_on(job, rank)
        news = _work(job, rank)
        _flush()
        doorbell.sendall(RECORD.pack(news, rank, 0))
        while os.getppid() == born_of:
            time.sleep(0.5)
    except BaseException:
        traceback.print_exc()  # Nothing else is left to say it with.
    finally:
        os._exit(CANNOT_REPORT)


def _take_on(job: Job, rank: int) -> None:
    """Become part of the caller's world: its environment, folder and import path; and print into a file."""
    global current
    current = (rank, job.world_size)
    output = os.open(job.path("output", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    os.close(nothing)
    os.close(output)
    sys.stdin = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = _unbuffered(1)
    sys.stderr = sys.__stderr__ = _unbuffered(2)
    stack = open(job.path("stack", rank), "w")
    faulthandler.enable(stack, all_threads=True)
    if STACK_SIGNAL is not None and hasattr(faulthandler, "register"):
        faulthandler.register(STACK_SIGNAL, stack, all_threads=True)
    builtins.input = sys.breakpointhook = _no_keyboard
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.interface())
    os.chdir(job.working_directory)
    sys.path[:] = job.import_path
    importlib.invalidate_caches()
    torch.set_num_threads(1)  # N ranks of N threads each would crawl.


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    """A text stream whose every character is out at once, so that a rank that dies loses none."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _no_keyboard(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("a rank has no keyboard: input() and breakpoint() cannot work. Set a variable before, or give run() an argument")


def _work(job: Job, rank: int) -> News:
    """Join the others, call the function, and leave its result or its failure behind."""
    pid = os.getpid()
    notebook = types.ModuleType("__main__")
    sys.modules["__main__"] = notebook  # Pickle looks the caller's classes up there.
    try:
        function, args = payload.load(job.path("work"), notebook.__dict__)
        _seed(job.seed, rank)
        _join(job, rank)
        with Counting() if job.record == COMPUTE else nullcontext():
            result = call(function, args)
        wait_for_threads()
        if os.getpid() == pid:
            _save_result(job, rank, result)
            news = News.DONE
    except BaseException as error:
        if os.getpid() == pid:
            _save_failure(job, rank, error)
            news = News.FAILED
        else:
            traceback.print_exc()
    if os.getpid() != pid:  # The function has forked, and this is the fork: it has no result of its own.
        _flush()
        os._exit(0)
    return news


def _seed(seed: int, rank: int) -> None:
    """Every rank draws other numbers, so that a missing broadcast shows; every run draws the same."""
    own = (seed * 1_000_003 + rank) % 2**32
    random.seed(own)
    numpy.random.seed(own)
    if torch.cuda.is_available():
        torch.manual_seed(own)
    else:
        torch.default_generator.manual_seed(own)  # Without asking every kind of device: that takes 10 ms.


def _join(job: Job, rank: int) -> None:
    """Become part of the process group of this run."""
    if job.record:
        pen.start(job.path("rows", rank), job.path("tables", rank), rank, job.timeout, outermost=call.__code__)
        recorder.install()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.path("store"), job.world_size),
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=min(job.timeout + _GLOO_SPARE_SECONDS, _GLOO_LONGEST_SECONDS)),
    )
    # Or a rank that dies at once would find others still connecting, and gloo complains of that at length.
    getattr(dist.group.WORLD, "inner", dist.group.WORLD).barrier().wait()  # It is not the learner's: not to be recorded.


def call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call the learner's function."""
    return function(*args)


def wait_for_threads() -> None:
    """A program ends when its threads have ended, but for daemons; pools of threads are told to end before that, as Python does."""
    for end_of_pools in reversed(getattr(threading, "_threading_atexits", ())):
        end_of_pools()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


# What a rank is doing whose stack, as the learner may see it, begins in one of these.
DOING = {call.__name__: "was in a library", wait_for_threads.__name__: "was waiting for threads that it had started"}


def _flush() -> None:
    """Files that were left open are written before the caller goes on, and so are the buffers of C libraries."""
    for file in gc.get_objects():
        if issubclass(type(file), _FILES_WITH_BUFFERS):  # isinstance would ask some objects more than they like.
            with suppress(Exception):  # It may be closed, or a learner's own kind.
                file.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def _save_result(job: Job, rank: int, result: Any) -> None:
    try:
        payload.save(job.path("result", rank), result)
    except OSError:
        raise
    except Exception as error:
        why = payload.why_unpicklable(result.value if isinstance(result, CellValue) else result, "result")
        raise UnpicklableResult(why or f"it cannot be pickled ({error})") from None


def _save_failure(job: Job, rank: int, error: BaseException) -> None:
    try:
        told = json.dumps(report(error, without=__file__))
    except MemoryError:
        told = json.dumps(OUT_OF_MEMORY)
    with open(job.path("failure", rank), "w") as file:
        file.write(told)
