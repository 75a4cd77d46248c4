"""Two ends that do not fit: sizes, dtypes, shapes or arguments that differ between ranks, in words.

gloo notices few of them. A receive that is too long keeps old values, float32 arrives as int32, and some end the process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from allhands.errors import name_ranks
from allhands.events import HAS_ROOT, Columns, Kind, Shape, Site
from allhands.matching import NOBODY, Matching
from allhands.wording import count, does, on_group, paragraph, together

_SHOWN_CALLS = 6
_GLOO = "gloo, which carries the messages,"


@dataclass(frozen=True)
class Mismatch:
    """Operations that should fit each other and do not: what is wrong in words, and their places in the columns."""

    text: str
    ends: tuple[int, ...]


def find_mismatch(columns: Columns, matching: Matching) -> Mismatch | None:
    """The first mismatch of a run, if there is one: that which comes earliest in the program of its lowest rank."""
    found = [*_unequal_messages(columns, matching), *_unequal_collectives(columns, matching)]
    return min(found, key=lambda mismatch: _when(columns, mismatch), default=None)


def _when(columns: Columns, mismatch: Mismatch) -> tuple[int, tuple[int, ...]]:
    first = min(mismatch.ends)
    start = int(np.searchsorted(columns.rank, columns.rank[first]))
    return first - start, mismatch.ends


# --- messages -------------------------------------------------------------------------------------------------------


def _unequal_messages(columns: Columns, matching: Matching) -> Iterator[Mismatch]:
    sends = np.flatnonzero((columns.kind == Kind.SEND) & (matching.partner != NOBODY) & matching.is_sure)
    recvs = matching.partner[sends]
    pairs = columns.site[sends].astype("i8") * len(columns.sites) + columns.site[recvs]
    for first in np.unique(pairs, return_index=True)[1]:
        send, recv = int(sends[first]), int(recvs[first])
        text = _message_text(matching.site(send), matching.site(recv), columns)
        if text:
            yield Mismatch(text, (send, recv))


def _message_text(sent: Site, received: Site, columns: Columns) -> str:
    """Why the two ends of a message do not fit; empty, if they do."""
    if (sent.dtype, sent.shapes) == (received.dtype, received.shapes):
        return ""
    if sent.dtype != received.dtype:
        what = "dtype"
        effect = f"{_GLOO} does not convert: the bytes of {sent.dtype} numbers are read as {received.dtype}. Give both ends one dtype."
    elif sent.bytes_out < received.bytes_in:
        what = "size"
        kept = f"behind the first {count(sent.bytes_out, 'byte')} the tensor keeps what it held before"
        effect = f"{_GLOO} does not notice: {kept}. Make both tensors the same size."
    elif sent.bytes_out > received.bytes_in:
        what, effect = "size", f"{_GLOO} ends the process of a rank that gets more than it has room for. Make both tensors the same size."
    else:
        what, effect = "shape", "The numbers arrive in the order of memory, whatever the shape: reshape one of the two."
    ends = [paragraph([site.rank], columns.world_size, does(site, columns.groups), site) for site in (sent, received)]
    return "\n\n".join([f"The two ends of a message differ in {what}.", *ends, effect])


# --- collectives ----------------------------------------------------------------------------------------------------


def _unequal_collectives(columns: Columns, matching: Matching) -> Iterator[Mismatch]:
    for calls in matching.kinds_of_meetings():
        sites = [matching.site(call) for call in calls]
        what = _difference(sites, columns.groups[sites[0].group])
        if what:
            yield Mismatch(_collective_text(what, calls, columns, matching), tuple(calls))


def _difference(sites: list[Site], members: tuple[int, ...]) -> str:
    """What differs between the calls of one collective; empty, if they fit."""
    if len({site.kind for site in sites}) > 1:
        return "order"
    if len({site.name for site in sites}) > 1:
        return "form"
    if sites[0].kind in HAS_ROOT and len({site.peer for site in sites}) > 1:
        return "root"
    if len({site.reduce_op for site in sites}) > 1:
        return "reduce operation"
    if len({site.dtype for site in sites if site.shapes}) > 1:
        return "dtype"
    if len({shape for site in sites for shape in (*site.given, *site.taken)}) <= 1:
        return ""
    pieces = [(given, taken) for giver in sites for taker in sites if (given := _given(giver, taker, members)) is not None
              and (taken := _taken(giver, taker, members)) is not None]  # fmt: skip
    if any(np.prod(given, dtype="i8") != np.prod(taken, dtype="i8") for given, taken in pieces):
        return "size"
    if any(given != taken for given, taken in pieces):
        return "shape"
    return ""


def _given(giver: Site, taker: Site, members: tuple[int, ...]) -> Shape | None:
    """The piece that one rank hands over for another; None, if there is none."""
    has_piece_for_each = giver.kind in (Kind.SCATTER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
    return _piece(giver.given, members.index(taker.rank) if has_piece_for_each else 0)


def _taken(giver: Site, taker: Site, members: tuple[int, ...]) -> Shape | None:
    """The piece that one rank has room for from another."""
    if taker.kind is Kind.REDUCE and taker.rank != taker.peer:
        return _piece(taker.given, 0)  # It takes part in the sum, of which the root keeps the result.
    has_piece_of_each = taker.kind in (Kind.GATHER, Kind.ALL_GATHER, Kind.ALL_TO_ALL)
    return _piece(taker.taken, members.index(giver.rank) if has_piece_of_each else 0)


def _piece(shapes: tuple[Shape, ...], number: int) -> Shape | None:
    return shapes[number] if number < len(shapes) else None


def _collective_text(what: str, calls: list[int], columns: Columns, matching: Matching) -> str:
    sites = [matching.site(call) for call in calls]
    verb = partial(does, in_full=what in ("size", "shape"))
    told = [paragraph(ranks, columns.world_size, words, first) for ranks, words, first in together(sites, columns.groups, verb)]
    if len(told) > _SHOWN_CALLS:
        told[_SHOWN_CALLS:] = [f"And {len(told) - _SHOWN_CALLS} more, each in its own way."]
    number = matching.number_in_group(int(matching.meeting[calls[0]]))
    which = f"collective number {number}{on_group(sites[0], columns.groups)}"
    if what == "order":
        begin = f"Ranks call collectives in different order: {which} is not the same one everywhere."
        effect = "All ranks of a group have to call the same collectives in the same order."
    else:
        begin = f"Ranks disagree about the {what} of {which}."
        effect = f"All ranks of a group have to call it with the same {what}."
    missing = [rank for rank in columns.groups[sites[0].group] if rank not in {site.rank for site in sites}]
    if missing:
        told.append(f"{name_ranks(missing, columns.world_size).capitalize()} had not called it yet.")
    return "\n\n".join([begin, *told, effect])
