"""One rank's process, from birth to exit.

It takes on the caller's environment, sends all that is printed to a file, joins the process group, calls the function, leaves
the result or the failure in a file, rings, and then *stays*: gloo ends the legal messages of others when one of their peers leaves.
"""

import builtins
import ctypes
import difflib
import faulthandler
import gc
import importlib
import io
import json
import os
import random
import re
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import numpy.random  # numpy leaves it for later, and later is 10 ms in every rank
import torch
import torch.distributed as dist

from allhands import payload
from allhands.cell import CellValue
from allhands.job import RECORD, STACK_SIGNAL, Job, News
from allhands.stack import from_traceback

# The parent's own time-out comes first: gloo's is there only for the day that the parent is gone.
_GLOO_SPARE_SECONDS = 60.0
_GLOO_LONGEST_SECONDS = 7 * 24 * 3600.0
_SHOWN_MESSAGE = 1_000

current: "tuple[int, int] | None" = None
"""The rank and the world size of this process, if it is a rank."""


def main(job: Job, rank: int, doorbell: socket.socket) -> NoReturn:
    """Be rank `rank` of `job`. Never returns: the parent ends the process when it has all that it wants."""
    born_of = os.getppid()
    news = News.FAILED
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
        os._exit(1)


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
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    os.chdir(job.working_directory)
    sys.path[:] = job.import_path
    importlib.invalidate_caches()
    torch.set_num_threads(1)  # N ranks of N threads each would crawl.


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    """A text stream whose every character is out at once, so that a rank that dies loses none."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _loopback() -> str:
    """The name of the loopback interface: host names do not always resolve, and nothing should listen outside."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _no_keyboard(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("a rank has no keyboard: input() and breakpoint() cannot work. Set a variable before, or give run() an argument")


def _work(job: Job, rank: int) -> News:
    """Join the others, call the function, and leave its result or its failure behind."""
    namespace: dict[str, Any] = {}
    try:
        function, args = payload.load(job.path("work"))
        namespace = _become_main(function)
        _seed(job.seed, rank)
        patience = min(job.timeout + _GLOO_SPARE_SECONDS, _GLOO_LONGEST_SECONDS)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(job.path("store"), job.world_size),
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=patience),
        )
        dist.barrier()  # Or a rank that dies at once would find others still connecting, and gloo complains of that at length.
        _save_result(job, rank, function(*args))
        return News.DONE
    except BaseException as error:
        _save_failure(job, rank, error)
        return News.FAILED
    finally:
        namespace.clear()  # Files that were left open in the cell are closed, and so written, before the caller goes on.


def _become_main(function: Callable[..., Any]) -> dict[str, Any]:
    """Let `__main__` be the notebook, as far as it came along: pickle looks classes up there. Returns its variables."""
    if getattr(function, "__module__", None) == "__main__" and hasattr(function, "__globals__"):
        namespace = function.__globals__
    else:
        namespace = getattr(function, "namespace", {})

    def look_up(name: str) -> Any:
        try:
            return namespace[name]
        except KeyError:
            raise AttributeError(f"the notebook's variable {name!r} did not come along to this rank") from None

    notebook = types.ModuleType("__main__")
    notebook.__getattr__ = look_up  # type: ignore[method-assign]
    sys.modules["__main__"] = notebook
    return namespace


def _seed(seed: int, rank: int) -> None:
    """Every rank draws other numbers, so that a missing broadcast shows; every run draws the same."""
    own = (seed * 1_000_003 + rank) % 2**32
    random.seed(own)
    numpy.random.seed(own)
    if torch.cuda.is_available():
        torch.manual_seed(own)
    else:
        torch.default_generator.manual_seed(own)  # Without asking every kind of device: that takes 10 ms.


def _flush() -> None:
    """C libraries keep a buffer of their own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # The learner may have put anything there.
            pass
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


class UnpicklableResult(TypeError):
    """A function's result cannot go back to the notebook."""


def _save_failure(job: Job, rank: int, error: BaseException) -> None:
    """Write down what happened in plain text and numbers: the exception itself may not be picklable."""
    try:
        frames = from_traceback(error.__traceback__)
        told = {
            "what": _what(error),
            "hint": _hint(error),
            "frames": [(frame.filename, frame.line, frame.function) for frame in frames if frame.filename != __file__],
            "is_consequence": _is_lost_connection(error),
        }
        text = json.dumps(told)
    except MemoryError:
        error = error.with_traceback(None)
        gc.collect()
        text = json.dumps({"what": "ran out of memory", "hint": _MEMORY_HINT, "frames": [], "is_consequence": False})
    with open(job.path("failure", rank), "w") as file:
        file.write(text)


def _what(error: BaseException) -> str:
    """`raised ValueError: bad luck`, with its notes and what it was raised from."""
    if isinstance(error, UnpicklableResult):
        return f"cannot send the result back: {error}"
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    lines = [f"raised {_name_and_message(error)}", *getattr(error, "__notes__", ())]
    if error.__cause__ is not None:
        lines.append(f"raised from {_name_and_message(error.__cause__)}")
    return "\n".join(lines)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be made: {type(second).__name__})"


def _name_and_message(error: BaseException) -> str:
    message = _message(error)
    message = message.partition("\nException raised from ")[0]  # torch adds its own stack, addresses and all
    message = re.sub(r"(\[[0-9a-fA-F.:]+\])([:$]\d+)+", r"\1", message)  # and gloo the port
    message = re.sub(r"\[(enforce fail at )?[^][]*\.(cc|cpp|h):\d+\] ", "", message)  # and both a line of their source
    if len(message) > _SHOWN_MESSAGE:
        half = _SHOWN_MESSAGE // 2
        message = f"{message[:half]} … {len(message) - 2 * half:,} characters not shown … {message[-half:]}"
    name = type(error).__qualname__
    return f"{name}: {message}" if message else name


_MEMORY_HINT = "Memory ran out. Try smaller tensors or fewer ranks."


def _hint(error: BaseException) -> str:
    """What to try, for the mistakes that ranks make easy."""
    message = _message(error)
    if isinstance(error, SystemExit):
        return "A rank ends by returning: what it returns is its result."
    if isinstance(error, NameError):
        return _name_hint(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in message:
        return _MEMORY_HINT
    if "initialize the default process group twice" in message:
        return "Ranks are born with their process group: leave init_process_group out."
    if "Pair is not connected" in message:
        return "A rank cannot send to itself, or receive from itself."
    return ""


def _name_hint(error: NameError) -> str:
    """A name that was mistyped, that only cells have, or that another run took with it."""
    if error.name in ("rank", "world_size"):
        return f"Only %%ranks cells have {error.name}. In a function: dist.get_{error.name}()."
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    known = {*last.tb_frame.f_locals, *last.tb_frame.f_globals, *dir(builtins)} if last is not None else set()
    close = difflib.get_close_matches(error.name or "", sorted(known), n=1)
    if close:
        return f"Did you mean {close[0]}?"
    return "If another %%ranks cell made it: ranks are new in every run, and what they made is gone with them."


def _is_lost_connection(error: BaseException | None) -> bool:
    """Whether this only tells that a peer has gone, also if it was raised while handling that."""
    while error is not None:
        if isinstance(error, RuntimeError) and re.search(
            r"Connection (closed|reset|refused)|Broken pipe|Socket closed|onnect\w* .*(timeout|failed)", _message(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
