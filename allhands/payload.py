"""Values on their way between processes: pickled with their buffers beside them, and told apart when they cannot be.

Everything that cloudpickle takes: functions, classes, lambdas and closures from notebook cells included. Tensors travel as the
bytes that they show, so a small view of a large tensor is small; two tensors that share memory do not share it afterwards.
"""

import io
import marshal
import os
import pickle
import struct
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import cloudpickle
import torch

# Buffers start at multiples of this in the file, so that every dtype is aligned.
_ALIGNMENT = 64


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


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with plain tensors out of band, since torch's own way copies each of them three times."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):  # cloudpickle would drop the file name, by which a cell is told.
            return marshal.loads, (marshal.dumps(value),)
        if not _is_plain(value):
            return super().reducer_override(value)
        elements = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = pickle.PickleBuffer(elements.view(torch.uint8).numpy())
        return _rebuild_tensor, (data, value.dtype, tuple(value.shape), value.requires_grad)


def save(path: str, value: Any) -> None:
    """Write `value` to a new file."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    with open(path, "xb") as file:
        file.write(struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)))
        for part in parts:
            file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
            file.write(part)


def load(path: str) -> Any:
    """Read what `save` wrote; tensors and arrays come back writable."""
    with open(path, "rb") as file:
        (count,) = struct.unpack("<Q", file.read(8))
        parts = []
        for length in struct.unpack(f"<{count}Q", file.read(8 * count)):
            file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
            part = bytearray(length)
            file.readinto(part)
            parts.append(part)
    return pickle.loads(parts[0], buffers=parts[1:])


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
    elif hasattr(value, "__code__"):
        code = value.__code__
        cells = zip(code.co_freevars, value.__closure__ or (), strict=False)
        yield from ((f", in its variable {name}", cell.cell_contents) for name, cell in cells)
        names = [name for name in code.co_names if name in value.__globals__]
        yield from ((f", in the variable {name} that it uses", value.__globals__[name]) for name in names)
    elif hasattr(value, "__self__"):
        yield ".__self__", value.__self__
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def why_unpicklable(value: Any, name: str) -> str | None:
    """`name["model"][2] is a generator, and that cannot be sent …`, or None if `value` can be pickled."""
    seen: set[int] = set()
    reason = _pickling_error(value)
    if reason is None:
        return None
    while id(value) not in seen:
        seen.add(id(value))
        for step, part in _parts(value):
            deeper = _pickling_error(part)
            if deeper is not None and id(part) not in seen:
                name, value, reason = name + step, part, deeper
                break
    return f"{name} is a {type(value).__name__}, and that cannot be sent to another process ({reason})"


def _pickling_error(value: Any) -> str | None:
    try:
        _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(value)
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None
