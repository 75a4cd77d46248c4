"""The record of one run, which pictures, ledgers, checks and prices are made from."""

from collections.abc import Iterator
from functools import cached_property

from allhands.events import Columns, Event, Kind, RankFile
from allhands.ledger import Ledger
from allhands.matching import Matching
from allhands.mismatch import Mismatch, find_mismatch
from allhands.replay import Timeline, replay
from allhands.wording import count


class Trace:
    """Every operation of every rank. Iterating gives an `Event` each, by rank and then in the order of the program."""

    def __init__(self, files: list[RankFile]) -> None:
        self._files = files

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._files)

    @cached_property
    def columns(self) -> Columns:
        """The operations in columns."""
        return Columns(self._files)

    @cached_property
    def matching(self) -> Matching:
        """Both ends of every operation."""
        return Matching(self.columns)

    @cached_property
    def mismatch(self) -> Mismatch | None:
        """The first two ends that do not fit each other."""
        return find_mismatch(self.columns, self.matching)

    @cached_property
    def timeline(self) -> Timeline:
        """The run with messages of one unit each: the rounds, the waits, and who was where."""
        return replay(self.columns, self.matching)

    def ledger(self) -> Ledger:
        """Messages, bytes and rounds, by rank and by kind of operation."""
        return Ledger(self.columns, self.timeline)

    def __len__(self) -> int:
        return sum(len(file.rows) for file in self._files)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.columns)

    def __repr__(self) -> str:
        messages = int((self.columns.kind == Kind.SEND).sum())
        return f"<Trace of {count(self.world_size, 'rank')}: {count(len(self), 'operation')}, {count(messages, 'message')}>"
