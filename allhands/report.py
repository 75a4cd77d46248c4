"""How a rank tells of its failure: in plain text and numbers, since an exception itself may not be picklable, or worse."""

import builtins
import difflib
import re
from collections.abc import Iterator
from typing import Any

from allhands.stack import from_traceback

_SHOWN_MESSAGE = 1_000
_SHOWN_PARTS = 5
_MEMORY_HINT = "Memory ran out. Try smaller tensors or fewer ranks."
OUT_OF_MEMORY: dict[str, Any] = {"what": "ran out of memory", "hint": _MEMORY_HINT, "frames": [], "is_consequence": False}


class UnpicklableResult(TypeError):
    """A function's result cannot go back to the notebook."""


def report(error: BaseException, without: str) -> dict[str, Any]:
    """The fields of a `Failure`, for JSON. Calls of the file `without` are left out. Never raises what the exception itself does."""
    frames = [frame for each in _with_first_parts(error) for frame in from_traceback(each.__traceback__)]
    return {
        "what": _what(error),
        "hint": _hint(error),
        "frames": [(frame.filename, frame.line, frame.function) for frame in frames if frame.filename != without],
        "is_consequence": _is_lost_connection(error),
    }


def _with_first_parts(error: BaseException) -> Iterator[BaseException]:
    """An exception; if it is a group also its first part, and so on."""
    yield error
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        yield error


def _what(error: BaseException) -> str:
    """`raised ValueError: bad luck`, with its notes, its parts, and what it was raised from."""
    if isinstance(error, UnpicklableResult):
        return f"cannot send the result back: {error}"
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    lines = [f"raised {name_and_message(error)}", *map(str, getattr(error, "__notes__", ()))]
    if isinstance(error, BaseExceptionGroup):
        lines += [f"with {name_and_message(part)}" for part in error.exceptions[:_SHOWN_PARTS]]
    if error.__cause__ is not None and error.__cause__ is not error:
        lines.append(f"raised from {name_and_message(error.__cause__)}")
    return "\n".join(lines)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:
        return f"(its message cannot be made: {type(second).__name__})"


def name_and_message(error: BaseException) -> str:
    """`ValueError: bad luck`, without what changes from run to run, and whatever the exception's own methods do."""
    message = _message(error)
    message = message.partition("\nException raised from ")[0]  # torch adds its own stack, addresses and all
    message = re.sub(r"(\[[0-9a-fA-F.:]+\])([:$]\d+)+", r"\1", message)  # and gloo the port
    message = re.sub(r"\[(enforce fail at )?[^][]*\.(cc|cpp|h):\d+\] ", "", message)  # and both a line of their source
    if len(message) > _SHOWN_MESSAGE:
        half = _SHOWN_MESSAGE // 2
        message = f"{message[:half]} … {len(message) - 2 * half:,} characters not shown … {message[-half:]}"
    name = type(error).__qualname__
    return f"{name}: {message}" if message else name


def _hint(error: BaseException) -> str:
    """What to try, for the mistakes that ranks make easy."""
    message = _message(error)
    if isinstance(error, SystemExit):
        return "A rank ends by returning: what it returns is its result."
    if isinstance(error, NameError) and not isinstance(error, UnboundLocalError):
        return _name_hint(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in message:
        return _MEMORY_HINT
    if "initialize the default process group twice" in message:
        return "Ranks are born with their process group: leave init_process_group out."
    if _is_lost_connection(error):
        return "The other end has gone: did a rank end, or call destroy_process_group, before all were through?"
    if "Pair is not connected" in message:
        return "A rank cannot send to itself, or receive from itself."
    return ""


def _name_hint(error: NameError) -> str:
    """A name that was mistyped, that only cells have, or that another run took with it."""
    if error.name in ("rank", "world_size"):
        return f"Only %%ranks cells have {error.name}. In a function: dist.get_{error.name}()."
    if error.name in ("display", "get_ipython"):
        return f"Only the notebook has {error.name}. In a rank print, or end the cell with the value."
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    known = {*last.tb_frame.f_locals, *last.tb_frame.f_globals} if last is not None else set()
    close = [match for names in (known, dir(builtins)) for match in difflib.get_close_matches(error.name or "", sorted(names), n=1)]
    if close:
        return f"Did you mean {close[0]}?"
    return "If another %%ranks cell made it: ranks are new in every run, and what they made is gone with them."


def _is_lost_connection(error: BaseException) -> bool:
    """Whether this only tells that a peer has gone, also if it was raised while handling that."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is before for before in seen):
        seen.append(link)
        if isinstance(link, RuntimeError) and re.search(
            r"Connection (closed|reset|refused)|Broken pipe|Socket closed|onnect\w* .*(timeout|failed)", _message(link)
        ):
            return True
        link = link.__context__ if link.__cause__ is None else link.__cause__
    return False
