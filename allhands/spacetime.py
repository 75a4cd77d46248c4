"""The space-time picture: an arrow for each message, a band for each collective, and who waits. A deadlock with who points at whom."""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from allhands import palette, svg
from allhands.deadlock import Deadlock
from allhands.events import NO_PEER, P2P, Kind, Site
from allhands.lanes import BOTTOM, DRAWN_WIDTH, GUTTER, TOP, Lanes, Picture, neighbours
from allhands.stack import tell
from allhands.trace import Trace
from allhands.wording import does

_SHORT_TITLES_FROM = 200  # operations: titles then tell the innermost line only
_ROUND = (15.0, 92.0)  # the least and the most width of one round


class SpaceTime(Lanes):
    """Each message and each wait."""

    def __init__(self, trace: Trace, deadlock: Deadlock | None) -> None:
        super().__init__(trace, deadlock)
        self.step = min(max(DRAWN_WIDTH / self.rounds, _ROUND[0]), _ROUND[1])
        self.height = 48.0 if trace.world_size <= 8 else 34.0
        self.edge = self.x(self.rounds) + (self.step * 0.8 + 26 if self.is_unfinished() else 0)

    def x(self, time: float) -> float:
        """Where a moment is."""
        return GUTTER + 10 + time * self.step

    def y(self, rank: int) -> float:
        """Where a lane is."""
        return TOP + (rank + 0.5) * self.height

    def picture(self) -> Picture:
        """The whole."""
        bottom = TOP + self.trace.world_size * self.height
        parts = list(self._ruler(bottom))
        for rank in range(self.trace.world_size):
            is_open = rank in self.stuck or bool((self.columns.is_waiting & (self.columns.rank == rank)).any())
            end = self.edge if is_open else self.x(self.timeline.rounds_of_ranks[rank] if rank < len(self.timeline.rounds_of_ranks) else 0)
            parts += self.lane(rank, self.y(rank), end, 13)
            if not is_open and self.stuck:  # So that what points at it points at something.
                parts.append(svg.line(end, self.y(rank), self.edge, self.y(rank), palette.INK, 1, opacity=0.25, stroke_dasharray="1 5"))
            if not is_open:
                parts.append(
                    svg.line(end, self.y(rank) - 5, end, self.y(rank) + 5, palette.INK, 1.5, f"rank {rank} ends here", opacity=0.6)
                )
        parts += [*self._bands(), *self._waits(), *self._arrows(), *self._pointers()]
        width = self.edge + (190 if self.stuck else 20)
        return self.finished(parts, width, bottom + BOTTOM)

    def _ruler(self, bottom: float) -> Iterator[str]:
        every = max(1, math.ceil(24 / self.step))
        yield svg.text(GUTTER - 14, 38, "round", 11, "end", opacity=0.6)
        for number in range(self.rounds + 1):
            yield svg.line(self.x(number), TOP - 6, self.x(number), bottom, palette.INK, 1, opacity=0.1)
            if number and (number - 1) % every == 0 and self.timeline.rounds:
                yield svg.text(self.x(number - 0.5), 38, str(number), 11, "middle", opacity=0.6)

    def _waits(self) -> Iterator[str]:
        """A bar for as long as a rank stands and its data does not move yet."""
        line = self.timeline
        for index in np.flatnonzero(~np.isnan(line.wait_began)).tolist():
            rank, begin, end = int(self.columns.rank[index]), line.wait_began[index], line.began[index]
            is_for_ever = bool(np.isnan(end))
            if is_for_ever or end > begin:
                x = self.x(begin)
                length = (self.edge if is_for_ever else self.x(end)) - x
                colour = palette.ALARM if is_for_ever else palette.NEUTRAL
                title = f"rank {rank} waits: it {self._told(index)}"
                yield svg.rect(x, self.y(rank) - 4, length, 8, colour, title, rx=4, opacity=0.85 if is_for_ever else 0.4)

    def _arrows(self) -> Iterator[str]:
        line = self.timeline
        for index in np.flatnonzero(self.columns.kind == Kind.SEND).tolist():
            site = self.matching.site(index)
            colour = palette.of_rank(site.rank)
            if not np.isnan(line.began[index]):
                ends = (self.x(line.began[index]), self.y(site.rank), self.x(line.ended[index]), self.y(site.peer))
                title = f"round {int(line.ended[index])}: rank {site.rank} {self._told(index)}"
                yield _arrow(*ends, colour, title)
            elif not np.isnan(line.issued[index]) and not self.columns.is_waiting[index]:  # Sent, and nobody received it.
                x, y = self.x(line.issued[index]), self.y(site.rank)
                side = 1 if site.peer > site.rank else -1
                title = f"nobody received it: rank {site.rank} {self._told(index)}"
                yield svg.line(x, y, x + 10, y + side * self.height * 0.32, colour, 2, title, stroke_dasharray="3 2")
                yield svg.text(x + 13, y + side * self.height * 0.36, "✕", 11, "middle", fill=palette.ALARM)

    def _bands(self) -> Iterator[str]:
        """A collective: one band across its group, in a part for each run of neighbours."""
        for meeting in range(self.matching.number_of_meetings):
            calls = self.matching.calls(meeting)
            begin = self.timeline.began[calls[0]]
            if np.isnan(begin) or self.columns.kind[calls[0]] in (*P2P, Kind.NEW_GROUP):
                continue
            ranks = sorted(self.matching.members(meeting))
            site = self.matching.site(calls[0])
            left, width = self.x(begin) + 3, self.step - 6
            parts = neighbours(ranks)
            title = f"round {int(begin) + 1}: rank {site.rank} {self._told(calls[0])}"
            for first, last in parts:
                top, bottom = self.y(first) - self.height * 0.36, self.y(last) + self.height * 0.36
                shape = {"rx": 6, "fill_opacity": 0.22, "stroke": palette.NEUTRAL, "stroke_width": 1.2}
                yield svg.rect(left, top, width, bottom - top, palette.NEUTRAL, title, **shape)
            for (_, above), (below, _) in pairwise(parts):
                ends = (left + width / 2, self.y(above) + self.height * 0.36, left + width / 2, self.y(below) - self.height * 0.36)
                yield svg.line(*ends, palette.NEUTRAL, 1.5, title, stroke_dasharray="4 3")
            yield self._band_label(left + width / 2, (self.y(parts[0][0]) + self.y(parts[0][1])) / 2, width, site)

    def _band_label(self, x: float, y: float, width: float, site: Site) -> str:
        words = site.kind.label
        if len(words) * 6.6 <= width:
            return svg.text(x, y, words, 11, "middle", pointer_events="none")
        return svg.text(x, y, words, 11, "middle", transform=f"rotate(-90 {svg.number(x)} {svg.number(y)})", pointer_events="none")

    def _pointers(self) -> Iterator[str]:
        """Who points at whom: from each stuck rank to those that it needs."""
        for each in self.stuck.values():
            yield svg.text(self.edge + 44, self.y(each.rank), self._wish(each.operation), 12, fill=palette.ALARM, font_weight=600)
            for other in each.needs:
                bend = 12 + 6 * abs(other - each.rank)
                yield _pointer(self.edge + 2, self.y(each.rank), self.y(other), min(bend, 40), f"rank {each.rank} needs rank {other}")
        for rank in sorted({rank for each in self.stuck.values() for rank in each.needs} - set(self.stuck)):
            yield svg.text(self.edge + 44, self.y(rank), "has finished", 12, opacity=0.7)
        for operation in np.flatnonzero(self.columns.is_waiting).tolist() if self.stuck else ():
            rank = int(self.columns.rank[operation])
            if rank not in self.stuck:  # It waits for one of those.
                yield svg.text(self.edge + 44, self.y(rank), self._wish(operation), 12, opacity=0.7)

    def _wish(self, operation: int) -> str:
        site = self.matching.site(operation)
        if site.kind is Kind.RECV:
            return f"receives from {'anybody' if site.peer == NO_PEER else site.peer}"
        return f"sends to {site.peer}" if site.kind is Kind.SEND else site.kind.label

    def _told(self, index: int) -> str:
        site = self.matching.site(index)
        is_long = len(self.columns) > _SHORT_TITLES_FROM
        where = tell([frame for frame in site.place if not frame.is_library][-1:] if is_long else site.place)
        return does(site, self.columns.groups) + (f"\n{where}" if where else "")


def _arrow(x1: float, y1: float, x2: float, y2: float, colour: str, title: str) -> str:
    length = math.hypot(x2 - x1, y2 - y1)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    tip = (x2 - dx, y2 - dy)
    base = (x2 - 9 * dx, y2 - 9 * dy)
    corners = [tip, (base[0] - 4 * dy, base[1] + 4 * dx), (base[0] + 4 * dy, base[1] - 4 * dx)]
    head = svg.element("polygon", points=" ".join(f"{svg.number(x)},{svg.number(y)}" for x, y in corners), fill=colour)
    return svg.element("g", title, inside=svg.line(x1, y1, *base, colour, 2.2, stroke_linecap="round") + head)


def _pointer(x: float, y1: float, y2: float, bend: float, title: str) -> str:
    """A dashed bow from one lane to another, right of all."""
    points = ((x, y1), (x + bend, y1), (x + bend, y2), (x + 7, y2))
    start, *control = (f"{svg.number(a)} {svg.number(b)}" for a, b in points)
    curve = f"M{start}C{' '.join(control)}"
    bow = svg.element("path", d=curve, fill="none", stroke=palette.ALARM, stroke_width=1.8, stroke_dasharray="5 3")
    tip = f"{svg.number(x)},{svg.number(y2)} {svg.number(x + 8)},{svg.number(y2 - 4)} {svg.number(x + 8)},{svg.number(y2 + 4)}"
    return svg.element("g", title, inside=bow + svg.element("polygon", points=tip, fill=palette.ALARM))
