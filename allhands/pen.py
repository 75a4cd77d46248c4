"""The pen of the flight recorder: it writes down what a rank does, row by row, into memory-mapped files.

What it costs counts: a small message takes 50 microseconds. So the shapes, the lines and all else that repeats are looked up as one key,
and an operation then is four numbers in mapped memory, where the parent can read them also when this process is dead.
"""

import itertools
import json
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from allhands.events import HAS_LIMIT, ROW

_FIRST_BYTES = 1 << 16  # a multiple of what any system maps at once
_LARGEST_BYTES = 1 << 22
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN_NAMES = ("pen.py", "works.py", "recording_group.py", "recorder.py", "compute.py")
_RECORDERS_OWN = tuple(os.path.join(os.path.dirname(os.path.abspath(__file__)), name) for name in _OWN_NAMES)
_BACKWARD = "_engine_run_backward"  # the function of torch that calls the C++ engine, which calls DDP
_SLOT = ROW.itemsize // 4
ISSUED, WAITED, OVER = 1, 2, 3

ticks = itertools.count(1)  # Taking the next number is one step, whatever other threads do.
_is_librarys: dict[int, bool] = {}
_kept: list[CodeType] = []  # so that no other code gets the same id


def _is_library(code: CodeType) -> bool:
    """Whether code is torch's, or the recorder's; of each the answer is kept."""
    _kept.append(code)
    return _is_librarys.setdefault(id(code), _is_library_file(code.co_filename))


def _is_library_file(filename: str) -> bool:
    return filename.startswith(_TORCH) or filename in _RECORDERS_OWN


def with_stack(key: list[Any], frame: FrameType | None) -> tuple[Any, ...]:
    """A key, and where the program is: each call's code and place in it, the innermost first; torch's own innermost calls left out."""
    add, is_librarys, outermost = key.append, _is_librarys, current.outermost
    while frame is not None:
        code = frame.f_code
        known = is_librarys.get(id(code))
        if known is None:
            known = _is_library(code)
        if not known:
            break
        frame = frame.f_back
    while frame is not None:
        code = frame.f_code
        if code is outermost:
            break
        add(id(code))
        add(frame.f_lasti)
        frame = frame.f_back
    return tuple(key)


class Pen:
    """Writes what this rank does: rows into one file, sites, groups and places, one JSON object a line, into another."""

    def __init__(self, path: str, tables: str, rank: int, patience: float, outermost: CodeType) -> None:
        self.rank, self.patience, self.outermost = rank, patience, outermost
        self._rows = open(path, "w+b", opener=_private)
        self._tables = open(tables, "wb", buffering=0, opener=_private)
        self._lock = threading.Lock()
        self._size = 0
        self.is_muted = False
        self._places: dict[tuple[Any, ...], int] = {}
        self._groups = itertools.count()
        self.sites: dict[tuple[Any, ...], int] = {}
        self.segment = self._grow(None)
        self.head = self.segment[0]
        next(self.segment[1])  # Place 0 holds the counter.

    def _grow(self, full: Any) -> tuple[memoryview, "itertools.count[int]"]:
        """Room for more rows: a view of it, and the places in it that are still free."""
        with self._lock:
            if self.is_muted:
                self.segment = self.segment[0], itertools.count(0, _SLOT)
            elif full is None or self.segment is full:
                size = min(max(self._size, _FIRST_BYTES), _LARGEST_BYTES)
                self._rows.seek(self._size)
                self._rows.write(bytes(size))  # Written, not skipped: a full disk is an error here, and a crash in mapped memory.
                self._rows.flush()
                view = memoryview(mmap.mmap(self._rows.fileno(), size, offset=self._size)).cast("I")
                self._size += size
                self.segment = view, itertools.count(0, _SLOT)
            return self.segment

    def row(self, site: int) -> tuple[memoryview, int]:
        """Write down that an operation is issued. Its row: a view, and the place in it."""
        segment = self.segment
        view, free = segment
        place = next(free)
        try:
            view[place + ISSUED] = tick = next(ticks)
        except IndexError:
            self._grow(segment)
            return self.row(site)
        view[place] = site
        self.head[0] = tick
        return view, place

    def mute(self) -> None:
        """Write into nothing from now on: this is a fork of the rank, and the files are the rank's."""
        self.is_muted = True
        self._rows = self._tables = open(os.devnull, "wb", buffering=0)
        self.segment = memoryview(bytearray(_FIRST_BYTES)).cast("I"), itertools.count(0, _SLOT)
        self.head = self.segment[0]

    def take_back(self, row: tuple[memoryview, int]) -> None:
        """The operation was refused: it has not been."""
        view, place = row
        view[place] = 0

    @contextmanager
    def waiting(self, site: int, has_limit: bool) -> Iterator[None]:
        """Write down an operation that is waited for at once, for as long as this is entered."""
        row = view, place = self.row(site)
        view[place + WAITED] = next(ticks) | (HAS_LIMIT if has_limit else 0)
        self.head[0] = next(ticks)
        try:
            yield
        except BaseException:
            self.take_back(row)
            raise
        finally:
            view[place + OVER] = self.head[0] = next(ticks)

    def group(self, ranks: list[int]) -> int:
        """Write down a group. Its number."""
        with self._lock:
            self._write({"group": ranks})
            return next(self._groups)

    def site(self, key: tuple[Any, ...], frame: FrameType | None, **fields: Any) -> int:
        """Write down a site that is not known yet. Its number, from 1."""
        frames, codes = [], []
        while frame is not None and frame.f_code is not self.outermost:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            codes.append(frame.f_code)
            frame = frame.f_back
        is_in_backward = False
        while frames and _is_library_file(frames[0][0]):
            is_in_backward = is_in_backward or frames[0][2] == _BACKWARD
            del frames[0]
        place = tuple(frames[::-1])
        with self._lock:
            if key not in self.sites:
                _kept.extend(codes)
                if place not in self._places:
                    self._places[place] = len(self._places)
                    self._write({"place": place})
                self._write({"site": fields | {"place": self._places[place], "is_in_backward": is_in_backward}})
                self.sites[key] = len(self.sites) + 1
            return self.sites[key]

    def _write(self, fields: dict[str, Any]) -> None:
        # A program may give a rank as a number of numpy's, or as a tensor.
        self._tables.write(json.dumps(fields, default=int).encode() + b"\n")


current: Pen
"""This rank's."""


def start(path: str, tables: str, rank: int, patience: float, outermost: CodeType) -> None:
    """Write from now on into these two files.

    `patience`: seconds until the run is stopped. `outermost`: the function of ours that calls the learner's.
    """
    global current
    current = Pen(path, tables, rank, patience, outermost)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=current.mute)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
