"""What ranks did: the operations that they asked for, in columns. Written by each rank into a file of its own, read by the parent.

An operation is one row of four numbers: its *site*, and the moments (ticks of the rank's own counter, never a time) at which it was
issued, first waited for, and over. A site is all that repeats when a line runs again: the kind of operation, the group, the
peer, the tag, shapes and dtype, the thread, the lines of code. So a million operations take 16 MB, and a loop adds only numbers.
"""

import enum
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from allhands.stack import Frame

ROW = np.dtype([("site", "u4"), ("issued", "u4"), ("waited", "u4"), ("over", "u4")])
"""One operation in a rank's file. Its place 0 is not an operation: it holds the counter, so that one look tells whether something moved."""

HAS_LIMIT = 1 << 31
"""In `waited`: this wait may end by itself, after a time of its own."""

HAS_FUTURE = 1 << 30
"""In `waited`: somebody has its future, so that something may be done when it is over."""

HAS_FAILED = 1 << 31
"""In `over`: it ended with an error."""

WORLD = 0
"""The number of the group of all ranks."""

NO_PEER = -1


class Kind(enum.IntEnum):
    """The kinds of operations, by the names that `torch.distributed` gives them."""

    SEND = 1
    RECV = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_REDUCE = 5
    SCATTER = 6
    GATHER = 7
    ALL_GATHER = 8
    REDUCE_SCATTER = 9
    ALL_TO_ALL = 10
    BARRIER = 11
    NEW_GROUP = 12
    COMPUTE = 13

    @property
    def label(self) -> str:
        """As in code: `all_reduce`."""
        return self.name.lower()


P2P = (Kind.SEND, Kind.RECV)
HAS_ROOT = (Kind.BROADCAST, Kind.REDUCE, Kind.SCATTER, Kind.GATHER)
Shape = tuple[int, ...]


class Site(NamedTuple):
    """What an operation of one rank is, apart from when. Ranks are those of the world, and sizes are bytes.

    `peer`: whom a send goes to or a recv comes from, or a collective's root, or -1. `given` and `taken`: the shapes of the tensors that
    the rank hands over to others and gets from them, in the order of the group where there is one for each member. `name`: what was called.
    `thread`: which one of the rank, by a number that the system gives it. `place`: the lines of code, the outermost first.
    """

    rank: int
    kind: Kind
    group: int
    peer: int
    tag: int
    dtype: str
    given: tuple[Shape, ...]
    taken: tuple[Shape, ...]
    bytes_out: int
    bytes_in: int
    reduce_op: str
    name: str
    thread: int
    place: tuple[Frame, ...]
    has_limit: bool = False
    is_in_backward: bool = False
    is_from_any: bool = False
    flops: int = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The tensors that the operation is about."""
        return self.given or self.taken


class Event(NamedTuple):
    """One operation of one rank, for reading. `waited` and `over` are 0 as long as that has not happened."""

    site: Site
    issued: int
    waited: int
    over: int


@dataclass(frozen=True)
class RankFile:
    """What has been read of one rank: rows, and the sites and groups that they speak of, as the rank numbers them."""

    rows: np.ndarray
    sites: list[dict[str, Any]]
    groups: list[list[int]]
    places: list[list[list[Any]]]

    @classmethod
    def read(cls, path: str, tables: str) -> "RankFile":
        """Read what is there by now; nothing, if the rank has not begun."""
        try:
            rows = np.fromfile(path, dtype=ROW)[1:]
            with open(tables, "rb") as file:
                lines = file.read().split(b"\n")[:-1]  # Behind the last newline may be half a line.
        except FileNotFoundError:
            rows, lines = np.empty(0, ROW), []
        read = cls(rows[rows["site"] > 0], [], [], [])
        into = {"site": read.sites, "group": read.groups, "place": read.places}
        for line in lines:
            (what, value), *_ = json.loads(line).items()
            into[what].append(value)
        return read


class Columns:
    """The operations of all ranks, sorted by rank and then by when they were issued. An index gives one `Event`."""

    def __init__(self, files: list[RankFile]) -> None:
        self.world_size = len(files)
        self.sites: list[Site] = []
        self.groups: list[tuple[int, ...]] = [tuple(range(self.world_size))]
        """The ranks of each group, in the group's own order; a group made twice of the same ranks is there twice."""
        self._group_numbers: dict[tuple[tuple[int, ...], int], int] = {(self.groups[WORLD], 0): WORLD}
        self._places: dict[tuple[tuple[Any, ...], ...], tuple[Frame, ...]] = {}
        parts = [self._take(rank, file) for rank, file in enumerate(files)]
        self.rank = np.repeat(np.arange(self.world_size, dtype="i4"), [len(part) for part in parts])
        rows = np.concatenate(parts) if parts else np.empty(0, ROW)
        self.site, self.issued = rows["site"], rows["issued"]
        self.over = rows["over"] & (HAS_FAILED - 1)
        self.has_failed = rows["over"] & HAS_FAILED > 0
        """Which operations ended with an error."""
        self.waited = rows["waited"] & (HAS_FUTURE - 1)
        self.has_future = rows["waited"] & HAS_FUTURE > 0
        """Of which operations somebody has the future."""
        self.has_limit = (rows["waited"] & HAS_LIMIT > 0) | (self.of_sites(site.has_limit for site in self.sites) > 0)
        """Which operations may end by themselves: they have a time-out of their own, shorter than the run's."""

    def _take(self, rank: int, file: RankFile) -> np.ndarray:
        """A rank's rows with the sites numbered as here (from 0)."""
        groups = []
        for ranks in map(tuple, file.groups):
            occurrence = sum(self.groups[number] == ranks for number in groups)
            groups.append(self._group_numbers.setdefault((ranks, occurrence), len(self.groups)))
            if groups[-1] == len(self.groups):
                self.groups.append(ranks)
        first = len(self.sites)
        for fields in file.sites:
            place = self._place(file.places[fields["place"]])
            self.sites.append(_site(fields | {"rank": rank, "group": groups[fields["group"]], "place": place}, self.groups))
        rows = file.rows[file.rows["site"] <= len(file.sites)]  # The file of sites was read a moment later or earlier.
        rows = rows[np.argsort(rows["issued"], kind="stable")]
        rows["site"] = rows["site"].astype("i8") + (first - 1)
        return rows

    def _place(self, frames: list[list[Any]]) -> tuple[Frame, ...]:
        key = tuple(map(tuple, frames))
        if key not in self._places:
            self._places[key] = tuple(Frame(*frame) for frame in frames)
        return self._places[key]

    def __len__(self) -> int:
        return len(self.site)

    def __getitem__(self, index: int) -> Event:
        values = (int(column[index]) for column in (self.issued, self.waited, self.over))
        return Event(self.sites[self.site[index]], *values)

    def __iter__(self) -> Iterator[Event]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def kind(self) -> np.ndarray:
        """The kind of each operation."""
        return self.of_sites(site.kind for site in self.sites)

    def of_sites(self, values: Iterable[int]) -> np.ndarray:
        """A column made of one whole number per site."""
        return np.fromiter(values, "i8", len(self.sites))[self.site]

    @cached_property
    def is_waiting(self) -> np.ndarray:
        """Which operations are being waited for: at this moment, or when the rank was stopped."""
        return (self.waited > 0) & (self.over == 0)

    @cached_property
    def was_let_go(self) -> np.ndarray:
        """Which sends and receives were given up without a wait: what `isend` returned was not kept."""
        return (self.waited == 0) & (self.over > 0) & np.isin(self.kind, P2P)


def _site(fields: dict[str, Any], groups: list[tuple[int, ...]]) -> Site:
    ranks = groups[fields["group"]]
    shapes = {name: tuple(map(tuple, fields[name])) for name in ("given", "taken")}
    peer = fields["peer"]
    return Site(**fields | shapes | {"kind": Kind(fields["kind"]), "peer": ranks[peer] if 0 <= peer < len(ranks) else NO_PEER})


def tick_of(file: BinaryIO) -> int:
    """The counter of the rank whose (unbuffered) file this is: it grows with everything that the rank does."""
    file.seek(0)
    return int.from_bytes(file.read(4), sys.byteorder)
