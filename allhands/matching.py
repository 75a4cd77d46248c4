"""Both ends of every operation: which send belongs to which receive, and which calls make one collective."""

import numpy as np

from allhands.events import NO_PEER, P2P, WORLD, Columns, Kind, Site

NOBODY = -1
Channel = tuple[int, int, int, int]
"""Group, sender, receiver, tag: messages of one channel arrive in the order in which they were sent."""


class Matching:
    """Who met whom. Indices are places in the columns; -1 where there is no other end."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        kind = columns.kind
        self.partner = np.full(len(columns), NOBODY)
        """The other end of each send and receive; what is not sure (`is_sure`) may change when more is known."""
        self._match_messages()
        self.meeting = np.full(len(columns), NOBODY)
        """The number of the collective that each call is part of."""
        self._match_collectives(~np.isin(kind, [*P2P, Kind.COMPUTE]))

    # Messages.

    def _channels(self) -> tuple[np.ndarray, int]:
        """The channel of each site, by number; and how many there are."""
        numbers: dict[Channel, int] = {}
        channels = np.full(len(self.columns.sites), NOBODY)
        for number, site in enumerate(self.columns.sites):
            if site.kind in P2P and site.peer != NO_PEER:
                ends = (site.rank, site.peer) if site.kind is Kind.SEND else (site.peer, site.rank)
                channels[number] = numbers.setdefault((site.group, *ends, site.tag), len(numbers))
        return channels, len(numbers)

    def _match_messages(self) -> None:
        of_sites, number = self._channels()
        channel = of_sites[self.columns.site] if len(self.columns) else np.empty(0, "i8")
        sorted_ends, places, counts = [], [], []
        for kind in P2P:
            ends = np.flatnonzero((self.columns.kind == kind) & (channel != NOBODY))
            ends = ends[np.argsort(channel[ends], kind="stable")]
            sorted_ends.append(ends)
            places.append(_place_in_run(channel[ends]))
            counts.append(np.bincount(channel[ends], minlength=number))
        met = np.minimum(*counts)
        sends, recvs = (ends[place < met[channel[ends]]] for ends, place in zip(sorted_ends, places, strict=True))
        self.partner[sends], self.partner[recvs] = recvs, sends
        # A receive from whoever sends may take a message before it is known whose. Until then nothing is sure about its rank and tag.
        unsure = {(site.group, site.rank, site.tag) for site in map(self.site, self.from_any())}
        is_unsure = self.columns.of_sites(
            site.kind in P2P and (site.group, site.peer if site.kind is Kind.SEND else site.rank, site.tag) in unsure
            for site in self.columns.sites
        )
        self.is_sure = is_unsure == 0

    def from_any(self) -> list[int]:
        """The receives from whoever sends, of which it is not known yet whose message they got."""
        return np.flatnonzero(
            (self.columns.kind == Kind.RECV) & (self.columns.of_sites(s.peer for s in self.columns.sites) == NO_PEER)
        ).tolist()

    def candidates(self, recv: int) -> list[int]:
        """The sends that a receive from whoever sends may take: those that nobody has received."""
        site = self.site(recv)
        channel = (site.group, site.rank, site.tag)
        return [send for send in self.unmatched(Kind.SEND) if (s := self.site(send)) and (s.group, s.peer, s.tag) == channel]

    def unmatched(self, kind: Kind) -> list[int]:
        """The sends or receives without another end."""
        return np.flatnonzero((self.columns.kind == kind) & (self.partner == NOBODY)).tolist()

    # Collectives.

    def _match_collectives(self, is_collective: np.ndarray) -> None:
        """The first call of each member of a group is one collective, the second calls another, and so on."""
        group = self.columns.of_sites(site.group for site in self.columns.sites)
        calls = np.flatnonzero(is_collective)
        calls = calls[np.lexsort((calls, self.columns.rank[calls], group[calls]))]
        place = _place_in_run(group[calls] * self.columns.world_size + self.columns.rank[calls])
        longest = np.zeros(len(self.columns.groups) + 1, "i8")
        np.maximum.at(longest, group[calls] + 1, place + 1)
        self._first_meeting = np.cumsum(longest)
        self.meeting[calls] = self._first_meeting[group[calls]] + place
        self._calls = calls[np.argsort(self.meeting[calls], kind="stable")]
        self._call_bounds = np.searchsorted(self.meeting[self._calls], np.arange(self.number_of_meetings + 1))

    @property
    def number_of_meetings(self) -> int:
        """How many collectives there are, those that not all members have called included."""
        return int(self._first_meeting[-1])

    def calls(self, meeting: int) -> list[int]:
        """The calls that make one collective, by rank."""
        return self._calls[self._call_bounds[meeting] : self._call_bounds[meeting + 1]].tolist()

    def members(self, meeting: int) -> tuple[int, ...]:
        """The ranks that should take part in a collective."""
        return self.columns.groups[self.group_of(meeting)]

    def group_of(self, meeting: int) -> int:
        """The group that a collective is on."""
        return int(np.searchsorted(self._first_meeting, meeting, side="right")) - 1

    def number_in_group(self, meeting: int) -> int:
        """Which one of its group a collective is: 1 is the first. That a group is made is not one of its collectives."""
        group = self.group_of(meeting)
        return meeting - int(self._first_meeting[group]) + (group == WORLD)

    def kinds_of_meetings(self) -> list[list[int]]:
        """One meeting for each set of sites that met, the first of them: what holds for it holds for the others."""
        sites = self.columns.site[self._calls]
        seen: dict[bytes, int] = {}
        for meeting in range(self.number_of_meetings):
            low, high = self._call_bounds[meeting : meeting + 2]
            seen.setdefault(sites[low:high].tobytes(), meeting)
        return [self.calls(meeting) for meeting in seen.values()]

    def site(self, index: int) -> Site:
        """The site of one operation."""
        return self.columns.sites[self.columns.site[index]]


def _place_in_run(values: np.ndarray) -> np.ndarray:
    """For sorted values: which one of its equals each is, from 0."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1)) if len(values) else np.empty(0, "i8")
    lengths = np.diff(starts, append=len(values))
    return np.arange(len(values)) - np.repeat(starts, lengths)
