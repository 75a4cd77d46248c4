"""What pictures of a run have in common: a lane for each rank, a line of summary on top."""

from dataclasses import dataclass

import numpy as np

from allhands import palette, svg
from allhands.deadlock import Deadlock
from allhands.events import Kind
from allhands.matching import NOBODY
from allhands.trace import Trace
from allhands.wording import count

GUTTER, TOP, BOTTOM = 74.0, 54.0, 14.0
DRAWN_WIDTH = 720.0
_WIDTH_OF_A_LETTER = 7.0


@dataclass(frozen=True)
class Picture:
    """A picture for a notebook; where there is none, a line of text."""

    svg: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.svg


class Lanes:
    """What both pictures have: lanes with their names, and a line of summary."""

    def __init__(self, trace: Trace, deadlock: Deadlock | None) -> None:
        self.trace, self.deadlock = trace, deadlock
        self.columns, self.matching, self.timeline = trace.columns, trace.matching, trace.timeline
        self.stuck = {each.rank: each for each in deadlock.stuck} if deadlock else {}
        self.rounds = max(trace.timeline.rounds, 1)

    def summary(self) -> str:
        """`4 ranks: 24 messages in 6 rounds`."""
        kind, took_place = self.columns.kind, ~np.isnan(self.timeline.began)
        sends = took_place & (kind == Kind.SEND)
        meetings = len({*self.matching.meeting[took_place & (self.matching.meeting != NOBODY) & (kind != Kind.NEW_GROUP)].tolist()})
        parts = [count(int(sends.sum()), "message")] if sends.any() or not meetings else []
        parts += [count(meetings, "collective")] if meetings else []
        told = f"{count(self.trace.world_size, 'rank')}: {' and '.join(parts)} in {count(self.timeline.rounds, 'round')}"
        return f"{told}; {'deadlock' if self.deadlock else 'stopped'}" if self.is_unfinished() else told

    def is_unfinished(self) -> bool:
        """Whether ranks were waiting when it ended."""
        return bool(self.columns.is_waiting.any())

    def lane(self, rank: int, y: float, end: float, size: float) -> list[str]:
        """A rank's name, and its lane up to where it ends."""
        return [
            svg.text(GUTTER - 14, y, f"rank {rank}", size, "end", fill=palette.of_rank(rank), font_weight=600),
            svg.line(GUTTER, y, end, y, palette.INK, 1, opacity=0.3),
        ]

    def finished(self, parts: list[str], width: float, height: float, note: str = "") -> Picture:
        """The whole, with its summary on top, and a note at the bottom."""
        words = self.summary()
        width = max(width, GUTTER + _WIDTH_OF_A_LETTER * max(len(words), len(note)))
        head = [svg.text(GUTTER, 14, words, 13, opacity=0.85)]
        if note:
            parts.append(svg.text(GUTTER, height + 6, note, 12, opacity=0.7))
            height += 22
        return Picture(svg.picture(width, height, f"Space-time picture: {words}", self.description(), head + parts), f"[picture: {words}]")

    def description(self) -> str:
        """For those who cannot see it."""
        if self.deadlock:
            return self.deadlock.standing.partition("\n")[0]
        waits = np.nansum(self.timeline.began - self.timeline.wait_began, where=self.timeline.began > self.timeline.wait_began)
        return f"Time goes to the right. Waiting, added up over all ranks: {count(int(waits), 'round')}."


def neighbours(numbers: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers: the first and the last of each."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
