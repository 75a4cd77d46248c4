"""The picture of a run that is too large for arrows: how much of the time each rank sends, receives or waits."""

import math
from collections.abc import Iterator

import numpy as np

from allhands import palette, svg
from allhands.events import Kind
from allhands.lanes import BOTTOM, DRAWN_WIDTH, GUTTER, TOP, Lanes, Picture, neighbours
from allhands.wording import count

_COLUMNS, _CELLS = 60, 3000
_LEVELS = 4


class Condensed(Lanes):
    """Too many to show each: for every rank, how much of its time it sends, receives or waits, in columns of equal length."""

    def picture(self) -> Picture:
        """The whole."""
        ranks = self.trace.world_size
        number = max(1, min(self.rounds, _COLUMNS, _CELLS // ranks))
        each = math.ceil(self.rounds / number)
        number = math.ceil(self.rounds / each)
        width = DRAWN_WIDTH / number
        height = max(6.0, min(24.0, 480 / ranks))
        line, parts = self.timeline, []
        for rank in range(ranks):
            mine = (self.columns.rank == rank) & (self.columns.kind != Kind.COMPUTE)
            y = TOP + (rank + 0.5) * height
            if rank % max(1, math.ceil(12 / height)) == 0:
                parts += self.lane(rank, y, GUTTER + DRAWN_WIDTH, min(12, height))
            waiting = _share(line.wait_began[mine], line.began[mine], each, number)
            moving = _share(line.began[mine], line.ended[mine], each, number)
            parts += _cells(waiting, y - height * 0.4, width, height * 0.8, palette.NEUTRAL, f"rank {rank} waits")
            parts += _cells(moving, y - height * 0.4, width, height * 0.8, palette.of_rank(rank), f"rank {rank} sends or receives")
        for place in range(0, number, max(1, math.ceil(60 / width))):
            parts.append(svg.text(GUTTER + place * width, 38, f"{place * each + 1:,}", 11, opacity=0.6))
        legend = "The stronger its colour, the more a rank sends or receives; grey: it waits."
        note = f"Condensed: a column is {count(each, 'round')}. {legend}"
        return self.finished(parts, GUTTER + DRAWN_WIDTH + 20, TOP + ranks * height + BOTTOM, note)


def _share(begin: np.ndarray, end: np.ndarray, each: int, number: int) -> np.ndarray:
    """How much of each column lies between begins and ends: 0 to 1."""
    known = ~np.isnan(begin) & ~np.isnan(end) & (end > begin)
    steps = np.zeros(number * each + 1)
    np.add.at(steps, begin[known].astype(int), 1)
    np.add.at(steps, end[known].astype(int), -1)
    return np.minimum(np.cumsum(steps)[:-1], 1).reshape(number, each).mean(axis=1)


def _cells(shares: np.ndarray, y: float, width: float, height: float, colour: str, title: str) -> Iterator[str]:
    """One path for each strength of colour."""
    levels = np.ceil(shares * _LEVELS).astype(int)
    for level in range(1, _LEVELS + 1):
        runs = neighbours(np.flatnonzero(levels == level).tolist())
        path = "".join(
            f"M{svg.number(GUTTER + first * width)} {svg.number(y)}h{svg.number((last - first + 1) * width)}"
            f"v{svg.number(height)}h{svg.number(-(last - first + 1) * width)}z"
            for first, last in runs
        )
        if path:
            yield svg.element("path", title, d=path, fill=colour, fill_opacity=level / _LEVELS)
