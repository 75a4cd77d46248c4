"""Values on their way between processes: pickled with their buffers beside them, and told apart when they cannot be.

Everything that cloudpickle takes: functions, classes, lambdas and closures from notebook cells included. Tensors travel as the
bytes that they show, so a small view of a large tensor is small; two tensors that share memory do not share it afterwards.
"""

import io
import marshal
import os
import pickle
import struct
import sys
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle as _cloudpickle
import torch

_MAIN = ("__main__", "__mp_main__")  # the second in a process that multiprocessing has spawned
_Cached = type(lru_cache(print))

# Buffers start at multiples of this in the file, so that every dtype is aligned.
_ALIGNMENT = 64
_LONGEST_PATH = 20


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """The tensor whose elements are the bytes of `data`."""
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)


def _is_plain(value: Any) -> bool:
    """Whether a tensor is nothing but its elements: no subclass, no other device, no attributes of its own."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.__dict__
    )


def _is_importable(function: Any) -> bool:
    """Whether another process can find it by its name."""
    found: Any = None if function.__module__ in _MAIN else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _cached_again(function: Any, parameters: dict[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with plain tensors out of band, since torch's own way copies each of them three times."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):  # cloudpickle would drop the file name, by which a cell is told.
            return marshal.loads, (marshal.dumps(value),)
        if isinstance(value, _Cached) and not _is_importable(value):  # pickle knows such a function only by name.
            return _cached_again, (value.__wrapped__, value.cache_parameters())
        if not _is_plain(value):
            return super().reducer_override(value)
        elements = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = pickle.PickleBuffer(elements.view(torch.uint8).numpy())
        return _rebuild_tensor, (data, value.dtype, tuple(value.shape), value.requires_grad)


class _Unpickler(pickle.Unpickler):
    """cloudpickle's load, but for two things.

    Functions of the caller's `__main__` share one namespace, as they do there: `notebook`, if given. And a class that is known here
    stays as it is: cloudpickle would overwrite it with the copy of it that went to a rank and came back.
    """

    def __init__(self, file: io.BytesIO, buffers: list[bytearray], notebook: dict[str, Any] | None) -> None:
        super().__init__(file, buffers=buffers)
        self._notebook = notebook
        self._known: set[type] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == _cloudpickle.__name__:
            if name == "_make_function" and self._notebook is not None:
                return partial(self._make_function, found)
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return partial(self._make_class, found)
            if name == "_class_setstate":
                return partial(self._fill_class, found)
        return found

    def _make_function(self, make: Any, code: types.CodeType, scope: dict[str, Any], *rest: Any) -> Any:
        if self._notebook is not None and scope.get("__name__") in _MAIN:
            self._notebook.update(scope)
            scope = self._notebook
        return make(code, scope, *rest)

    def _make_class(self, make: Any, *args: Any) -> Any:
        before = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
        made = make(*args)
        if made is before:
            self._known.add(made)
        return made

    def _fill_class(self, fill: Any, made: type, state: Any) -> Any:
        return made if made in self._known else fill(made, state)


def save(path: str, value: Any) -> None:
    """Write `value` to a new file, or nothing."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    with open(path, "xb") as file:
        try:
            file.write(struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)))
            for part in parts:
                file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
                file.write(part)
            file.flush()
        except BaseException:
            os.unlink(path)
            raise


def load(path: str, notebook: dict[str, Any] | None = None) -> Any:
    """Read what `save` wrote; tensors and arrays come back writable. `notebook` becomes the globals of functions of `__main__`."""
    with open(path, "rb") as file:
        (count,) = struct.unpack("<Q", file.read(8))
        parts = []
        for length in struct.unpack(f"<{count}Q", file.read(8 * count)):
            file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
            part = bytearray(length)
            file.readinto(part)
            parts.append(part)
    return _Unpickler(io.BytesIO(parts[0]), parts[1:], notebook).load()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, each with how to get at it: `[2]`, `["loss"]`, `.field`, or a name that a function uses."""
    if isinstance(value, partial):
        yield ".func", value.func
        yield from ((f".args[{index}]", part) for index, part in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", part) for key, part in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, types.FunctionType):
        code = value.__code__
        cells = zip(code.co_freevars, value.__closure__ or (), strict=False)
        yield from ((f", in its variable {name}", cell.cell_contents) for name, cell in cells)
        names = [name for name in code.co_names if name in value.__globals__]
        yield from ((f", in the variable {name} that it uses", value.__globals__[name]) for name in names)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def why_unpicklable(value: Any, name: str) -> str | None:
    """`name["model"][2] is a generator, and that cannot be sent …`, or None if `value` can be pickled."""
    reason = pickling_error(value)
    if reason is None:
        return None
    for _ in range(_LONGEST_PATH):
        deeper = _unpicklable_part(value)
        if deeper is None or "recursion" in reason:
            break
        step, value, reason = deeper
        name += step
    return f"{name} is a {type(value).__name__}, and that cannot be sent to another process ({reason})"


def _unpicklable_part(value: Any) -> tuple[str, Any, str] | None:
    """The first part of a value that cannot be pickled: how to get at it, itself, and why."""
    try:
        for step, part in _parts(value):
            reason = pickling_error(part)
            if reason is not None:
                return step, part, reason
    except Exception:  # The value may do anything when it is looked at.
        pass
    return None


def pickling_error(value: Any) -> str | None:
    """Why a value cannot be pickled, in a line; None if it can."""
    try:
        _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(value)
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None
