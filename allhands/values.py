"""What functions return: exactly equal or not, where they differ, and in a line of text."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_SHOWN_NUMBERS = 20
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic)


def same(expected: Any, got: Any) -> bool:
    """Exactly equal: dtype, shape and each element. A list may stand for a tuple. `got` is not asked what it thinks: it may be anything."""
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        return len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        try:
            return expected.dtype == got.dtype and torch.equal(expected, got)
        except RuntimeError:  # A tensor without numbers, or with few.
            return False
    if not isinstance(got, _PLAIN) or isinstance(expected, torch.Tensor):
        return False
    return bool(expected == got)


def in_words(value: Any) -> str:
    """A value in a line: `float32 [1., 2.]`, or its repr."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout != torch.strided or value.is_quantized:
        return _cut(spelt(value))
    dtype = str(value.dtype).removeprefix("torch.")
    numbers = repr(value.flatten()[:_SHOWN_NUMBERS].tolist() if value.numel() > _SHOWN_NUMBERS else value.tolist())
    return _cut(f"{dtype} {numbers}" if value.numel() else f"{dtype} {list(value.shape)}, empty")


def spelt(value: Any) -> str:
    """Its repr, without addresses, which differ from time to time; its type, if it has none."""
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    except Exception:
        return f"a {type(value).__name__}"


def _cut(text: str, length: int = 46) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1]}…"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of text in columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in (head, *rows))


def difference(expected: Any, got: Any) -> str:
    """Where a value first differs from what it should be, to follow "the first difference: in rank 0,"."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        if expected.dtype != got.dtype:
            return f"the dtype should be {expected.dtype} and is {got.dtype}"
        if expected.shape != got.shape:
            return f"the shape should be {list(expected.shape)} and is {list(got.shape)}"
        if got.is_meta or got.layout != torch.strided or got.is_quantized:
            return "the tensor does not hold its numbers as an ordinary one does"
        place = (expected != got).nonzero()[0].tolist()
        where = f"element {place[0] if len(place) == 1 else place}" if place else "the number"
        return f"{where} should be {expected[tuple(place)].item():g} and is {got[tuple(place)].item():g}"
    return f"it should be {in_words(expected)} and is {in_words(got)}"
