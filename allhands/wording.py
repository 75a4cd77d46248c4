"""Operations in words: what a rank sends, to whom, and on which line."""

import re
from collections.abc import Callable, Iterable, Sequence

from allhands.errors import first_letter_up, name_ranks
from allhands.events import HAS_ROOT, NO_PEER, P2P, WORLD, Kind, Shape, Site
from allhands.stack import tell

_SHOWN_SHAPES = 4
_SHOWN_RANKS = 8


def count(number: int, what: str) -> str:
    """`1 byte`, `1,024 bytes`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def tensor(dtype: str, shape: Shape) -> str:
    """`float32[2, 3]`; `float32[]` is a single number."""
    return f"{dtype}{list(shape)}"


def tensors(dtype: str, shapes: Sequence[Shape]) -> str:
    """One tensor, several, or `4 × float32[2]`."""
    if len(shapes) > 1 and len(set(shapes)) == 1:
        return f"{len(shapes)} × {tensor(dtype, shapes[0])}"
    shown = [tensor(dtype, shape) for shape in shapes[:_SHOWN_SHAPES]]
    return ", ".join([*shown, *(["…"] if len(shapes) > _SHOWN_SHAPES else [])])


def load(site: Site) -> str:
    """What is handed over or wanted, with its size: `float32[4] (16 bytes)`."""
    if not site.shapes:
        return "nothing"
    return f"{tensors(site.dtype, site.shapes)} ({count(site.bytes_out if site.given else site.bytes_in, 'byte')})"


def load_in_full(site: Site) -> str:
    """What is handed over and what is wanted, where both are there and differ: `float32[2] out, 3 × float32[2] in`."""
    if not site.given or not site.taken or site.given == site.taken:
        return load(site)
    return f"{tensors(site.dtype, site.given)} out, {tensors(site.dtype, site.taken)} in"


def call(site: Site) -> str:
    """A collective as it was called: `all_reduce(SUM)`, `broadcast(from rank 0)`."""
    parts = [site.reduce_op] if site.reduce_op else []
    if site.kind in HAS_ROOT and site.peer != NO_PEER:
        parts.append(f"{'to' if site.kind in (Kind.REDUCE, Kind.GATHER) else 'from'} rank {site.peer}")
    return f"{site.name}({', '.join(parts)})" if parts else site.name


def on_group(site: Site, groups: Sequence[Sequence[int]]) -> str:
    """` on the group of ranks 0 and 1`; nothing for the world."""
    return "" if site.group == WORLD else f" on {group_name(site.group, groups)}"


def group_name(group: int, groups: Sequence[Sequence[int]]) -> str:
    """`the world`, `the group of ranks 0 and 1`, `the second group of ranks 0 and 1`."""
    if group == WORLD:
        return "the world"
    same = [number for number, ranks in enumerate(groups) if number != WORLD and ranks == groups[group]]
    which = f"{_ordinal(same.index(group) + 1)} " if len(same) > 1 else ""
    return f"the {which}group of {listed(groups[group])}"


def _ordinal(number: int) -> str:
    """`first`, `second`, `third`, and then `4th`."""
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def listed(ranks: Iterable[int]) -> str:
    """`rank 0`, `ranks 0 and 2`, `ranks 0, 1 and 2`."""
    names = [str(rank) for rank in ranks]
    if len(names) > _SHOWN_RANKS:
        names = [*names[: _SHOWN_RANKS - 1], f"{len(names) - _SHOWN_RANKS + 1} more"]
    together = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"rank{'s' if len(names) > 1 else ''} {together}"


def have(ranks: Sequence[int]) -> str:
    """`Rank 2 has`, `Ranks 2 and 3 have`: the beginning of a sentence."""
    return f"{first_letter_up(listed(ranks))} {'has' if len(ranks) == 1 else 'have'}"


def _tag(site: Site) -> str:
    return f" with tag {site.tag}" if site.tag else ""


def does(site: Site, groups: Sequence[Sequence[int]], in_full: bool = False) -> str:
    """What an operation does, to follow a rank's name: `sends float32[4] (16 bytes) to rank 1`."""
    if site.kind is Kind.SEND:
        return f"sends {load(site)} to rank {site.peer}{_tag(site)}{on_group(site, groups)}"
    if site.kind is Kind.RECV:
        source = "whoever sends" if site.peer == NO_PEER else f"rank {site.peer}"
        return f"receives {load(site)} from {source}{_tag(site)}{on_group(site, groups)}"
    if site.kind is Kind.NEW_GROUP:
        return f"makes {group_name(site.group, groups)}"
    of = f" with {(load_in_full if in_full else load)(site)}" if site.shapes else ""
    return f"calls {call(site)}{of}{on_group(site, groups)}{' in backward' if site.is_in_backward else ''}"


def waits(site: Site, groups: Sequence[Sequence[int]]) -> str:
    """The same of one that waits for it: `waits to send float32[4] (16 bytes) to rank 1`."""
    verb, rest = does(site, groups).split(" ", 1)
    infinitive = {"sends": "to send", "receives": "to receive", "makes": "to make", "calls": "in"}[verb]
    return f"waits {infinitive} {rest}"


def paragraph(ranks: Sequence[int], world_size: int, what: str, site: Site | None) -> str:
    """What ranks do, and on which line."""
    where = tell(site.place) if site is not None else ""
    return first_letter_up(f"{name_ranks(ranks, world_size)} {what}") + (f":\n{where}" if where else ".")


def together(sites: Sequence[Site], groups: Sequence[Sequence[int]], verb: Callable[..., str] = does) -> list[tuple[list[int], str, Site]]:
    """What several ranks do, those together that do the same on the same line: the ranks, the words, the first site of each.

    Those that differ only in their peer are told together too: `receive float32[4] (16 bytes): 0 from 1, 1 from 0`.
    """
    alike: dict[object, list[Site]] = {}
    for site in sites:
        alike.setdefault(site._replace(rank=0, thread=0, peer=0 if site.kind in P2P else site.peer), []).append(site)
    told = []
    for same in alike.values():
        ranks = [site.rank for site in same]
        words = {plural(verb(site, groups), ranks) for site in same}
        if len(words) == 1:
            told.append((ranks, words.pop(), same[0]))
            continue
        preposition = "to" if same[0].kind is Kind.SEND else "from"
        ends = [f"{site.rank} {preposition} {'any' if site.peer == NO_PEER else site.peer}" for site in same]
        if len(ends) > _SHOWN_RANKS:
            ends = [*ends[: _SHOWN_RANKS - 1], "…"]
        peer = rf" {preposition} (rank \d+|whoever sends)"
        told.append((ranks, f"{re.sub(peer, '', plural(verb(same[0], groups), ranks), count=1)}: {', '.join(ends)}", same[0]))
    return told


def plural(verb_phrase: str, ranks: Sequence[int]) -> str:
    """`waits …` for one rank, `wait …` for several."""
    verb, rest = verb_phrase.split(" ", 1)
    return verb_phrase if len(ranks) == 1 else f"{verb.removesuffix('s')} {rest}"
