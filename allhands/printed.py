"""What the ranks printed: put in rank order, equal text folded, long text cut for the eye but never lost."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)

# What is shown of one block of text; all of it stays in `job.output`.
SHOWN_LINES = 200
SHOWN_CHARACTERS = 20_000
SHOWN_LINE = 2_000


def rank_label(ranks: Iterable[int]) -> str:
    """Ranks in their shortest spelling: `0-3`, `1,3`, `0,2-4`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def group_equal(values: Sequence[Value]) -> list[tuple[list[int], Value]]:
    """Equal values once, each with the ranks that have it, in the order of the lowest of them."""
    groups: list[tuple[list[int], Value]] = []
    place: dict[Value, int] = {}
    for rank, value in enumerate(values):
        if value in place:
            groups[place[value]][0].append(rank)
        else:
            place[value] = len(groups)
            groups.append(([rank], value))
    return groups


def as_on_screen(line: str) -> str:
    """A line as a terminal would leave it: what a carriage return overwrote is gone (progress bars)."""
    return line.rstrip("\r").rpartition("\r")[2]


def cut_line(line: str) -> str:
    """A line that is too long to show, with the number of characters left out of its middle."""
    if len(line) <= SHOWN_LINE:
        return line
    half = SHOWN_LINE // 2
    return f"{line[:half]} … {len(line) - 2 * half:,} characters not shown … {line[-half:]}"


def cut_block(lines: list[str]) -> list[str]:
    """The first and last lines of a block that is too long to show, and how many are between them."""
    room, kept = SHOWN_CHARACTERS, 0
    for line in lines[:SHOWN_LINES]:
        room -= len(line)
        if room < 0:
            break
        kept += 1
    if kept == len(lines):
        return lines
    head, tail = max(1, kept - kept // 4), kept // 4
    dropped = len(lines) - head - tail
    return [*lines[:head], f"… {dropped:,} lines not shown …", *(lines[-tail:] if tail else [])]


def fold(texts: Sequence[str]) -> str:
    """All texts in rank order, each line labelled with its ranks: `[0-3] hello`. Ranks without text are left out."""
    groups = [(ranks, text) for ranks, text in group_equal(texts) if text]
    labels = [f"[{rank_label(ranks)}]" for ranks, _ in groups]
    width = max(map(len, labels), default=0)
    shown: list[str] = []
    for label, (_, text) in zip(labels, groups, strict=True):
        lines = [cut_line(as_on_screen(line)) for line in text.removesuffix("\n").split("\n")]
        shown += (f"{label:<{width}} {line}".rstrip() for line in cut_block(lines))
    return "".join(line + "\n" for line in shown)


class LiveText:
    """One rank's text as it comes, in whole labelled lines, until the limit of what is shown is reached."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.half_line = ""
        self.room = SHOWN_CHARACTERS
        self.shown_lines = 0
        self.dropped_lines = 0

    def take(self, text: str, last: bool = False) -> Iterator[str]:
        """New text in, labelled lines out; `last` also gives the half line at the end, and how much was not shown."""
        *lines, self.half_line = (self.half_line + text).split("\n")
        if last and self.half_line:
            lines.append(self.half_line)
        for line in lines:
            if self.room > 0 and self.shown_lines < SHOWN_LINES:
                self.room -= len(line)
                self.shown_lines += 1
                yield f"[{self.rank}] {cut_line(as_on_screen(line))}".rstrip() + "\n"
            else:
                self.dropped_lines += 1
        if last and self.dropped_lines:
            yield f"[{self.rank}] … {self.dropped_lines:,} more lines not shown …\n"
