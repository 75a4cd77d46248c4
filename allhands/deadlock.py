"""Who waits for whom, and why that can never end: proved from what was recorded, not guessed from the time that has passed.

A rank that waits needs something of others: a receive the sender, a collective every member that has not called it yet. If those have
finished, or wait themselves for what can never come, it waits for ever. The largest set of such ranks is found by crossing out those that
may go on; shown is its smallest part that explains itself.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from allhands.errors import name_ranks
from allhands.events import NO_PEER, P2P, Columns, Kind, Site
from allhands.matching import NOBODY, Matching
from allhands.wording import count, does, group_name, have, paragraph, together, waits

_SHOWN_LINKS = 8


@dataclass(frozen=True)
class Stuck:
    """A rank that waits for ever: its operation (a place in the columns), and the ranks that it needs and will not get."""

    rank: int
    operation: int
    needs: tuple[int, ...]


@dataclass(frozen=True)
class Deadlock:
    """The smallest set of ranks that can never go on. `finished`: the ranks whose program is over.

    In words: `standing` says what each waits for, on which line, and `why` it cannot come, and what to try.
    """

    stuck: tuple[Stuck, ...]
    finished: tuple[int, ...]
    standing: str
    why: str

    @property
    def text(self) -> str:
        """All of it."""
        return f"{self.standing}\n\n{self.why}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that the proof speaks of: if one of them still does something, it does not hold."""
        return tuple(sorted({rank for each in self.stuck for rank in (each.rank, *each.needs)}))


def find_deadlock(
    columns: Columns, matching: Matching, finished: Collection[int], silent: Collection[int] = (), lost: Collection[int] = ()
) -> Deadlock | None:
    """The deadlock of ranks that are in the middle of a run, if there is one.

    `finished`: ranks whose program is over. `silent`: ranks that wait inside C++, where the recorder does not see for what: for all
    collectives that they have begun. `lost`: receives whose send was let go of, and whose message would have come by now.
    """
    judge = _Judge(columns, matching, finished, silent, lost)
    core = judge.smallest_core()
    return Deadlock(tuple(core), tuple(sorted(finished)), judge.standing(core), judge.why(core)) if core else None


class _Judge:
    def __init__(
        self, columns: Columns, matching: Matching, finished: Collection[int], silent: Collection[int], lost: Collection[int]
    ) -> None:
        self.columns, self.matching, self.finished, self.lost = columns, matching, set(finished), set(lost)
        self.waiting = self._waiting(set(silent))
        self.stuck = self._cross_out()

    def _waiting(self, silent: set[int]) -> dict[int, list[Stuck]]:
        """By rank what it waits for and does not have yet. A rank that waits for what is on its way is not there: it goes on."""
        columns, is_collective = self.columns, self.matching.meeting != NOBODY
        is_silent = np.isin(columns.rank, list(silent)) & (columns.waited == 0) & is_collective
        waiting: dict[int, list[Stuck]] = {}
        moving = set()
        for operation in np.flatnonzero(columns.is_waiting | is_silent | columns.has_future).tolist():
            rank, needs = int(columns.rank[operation]), self._needs(operation)
            if needs is not None:
                waiting.setdefault(rank, []).append(Stuck(rank, operation, needs))
            elif columns.is_waiting[operation]:
                moving.add(rank)
        # A future alone is nothing to wait for; but when it comes, it may help a rank that waits.
        wait = {*columns.rank[columns.is_waiting].tolist(), *silent}
        return {rank: operations for rank, operations in waiting.items() if rank in wait - moving}

    def _needs(self, operation: int) -> tuple[int, ...] | None:
        """The ranks that have to do something before an operation can end; for a receive from whoever sends, one of them.

        None if it is not the others that it needs: they are there already, or it ends by itself after a time.
        """
        site, matching = self.matching.site(operation), self.matching
        if self.columns.has_limit[operation]:
            return None
        if site.kind in P2P and site.peer == NO_PEER:
            others = tuple(rank for rank in self.columns.groups[site.group] if rank != site.rank)
            return None if matching.candidates(operation) else others
        if site.kind in P2P:
            is_alone = matching.partner[operation] == NOBODY or operation in self.lost
            return (site.peer,) if is_alone and matching.is_sure[operation] else None
        meeting = int(matching.meeting[operation])
        there = {int(self.columns.rank[call]) for call in matching.calls(meeting)}
        return tuple(rank for rank in matching.members(meeting) if rank not in there) or None

    def _cross_out(self) -> dict[int, list[Stuck]]:
        """The largest set of waiting ranks none of which can go on: those are crossed out that might, until nobody is left to cross out."""
        stuck = dict(self.waiting)
        while True:
            free = [rank for rank, operations in stuck.items() if any(not self._is_dead(each, stuck) for each in operations)]
            if not free:
                return stuck
            for rank in free:
                del stuck[rank]

    def _is_dead(self, operation: Stuck, stuck: dict[int, list[Stuck]]) -> bool:
        gone = [rank in stuck or rank in self.finished for rank in operation.needs]
        return all(gone) if self._is_from_any(operation) else any(gone)

    def _is_from_any(self, operation: Stuck) -> bool:
        site = self.matching.site(operation.operation)
        return site.kind is Kind.RECV and site.peer == NO_PEER

    # The smallest part of it.

    def smallest_core(self) -> list[Stuck]:
        """The fewest ranks that explain themselves, the lowest of such; with those that wait for the same collective beside them."""
        cores = [self._closure(rank) for rank in self.stuck]
        core = min(cores, key=lambda core: (len(core), sorted(core)), default={})
        needs = {int(self.matching.meeting[each.operation]): each.needs for each in core.values()}
        beside = {}
        for each in (each for operations in self.stuck.values() for each in operations):
            meeting = int(self.matching.meeting[each.operation])
            if meeting != NOBODY and meeting in needs:  # It waits for the same ranks.
                beside[each.rank] = Stuck(each.rank, each.operation, needs[meeting])
        together = beside | core
        return [together[rank] for rank in sorted(together)]

    def _closure(self, rank: int) -> dict[int, Stuck]:
        """A rank, those that it waits for, those that they wait for …: of several reasons a finished rank, else the lowest."""
        core: dict[int, Stuck] = {}
        queue = [rank]
        while queue:
            rank = queue.pop()
            if rank in core:
                continue
            operation = min(self.stuck[rank], key=self._place_in_program)
            dead = [other for other in operation.needs if other in self.finished or other in self.stuck]
            over = [other for other in dead if other in self.finished]
            reasons = dead if self._is_from_any(operation) else over or dead[:1]
            core[rank] = Stuck(rank, operation.operation, tuple(reasons))
            queue += [other for other in reasons if other not in self.finished]
        return core

    def _place_in_program(self, each: Stuck) -> tuple[object, ...]:
        """Of several things that a rank waits for the same one is shown every time: one on a line of the reader's, if there is one."""
        site = self.matching.site(each.operation)
        lines = tuple((frame.filename, frame.line) for frame in site.place if not frame.is_library)
        return (self.columns.waited[each.operation] == 0, not lines, lines, site.tag, each.operation)

    # The words.

    def standing(self, core: list[Stuck]) -> str:
        """What each rank waits for, on which line."""
        ranks = [each.rank for each in core]
        world = self.columns.world_size
        sites = [self.matching.site(each.operation) for each in core]
        if any(self.columns.waited[each.operation] for each in core) or any(site.is_in_backward for site in sites):
            begin = f"Deadlock: {name_ranks(ranks, world)} {'wait' if len(ranks) > 1 else 'waits'} for what can never come."
            verb = waits
        else:
            begin, verb = f"Deadlock: {name_ranks(ranks, world)} {'have' if len(ranks) > 1 else 'has'} begun what can never end.", does
        told = [paragraph(same, world, what, first) for same, what, first in together(sites, self.columns.groups, verb)]
        return "\n\n".join([begin, *told])

    def why(self, core: list[Stuck]) -> str:
        """Why it cannot end, and what to try."""
        return "\n".join(filter(None, self._reasons(core, [self.matching.site(each.operation) for each in core])))

    def _reasons(self, core: list[Stuck], sites: list[Site]) -> Iterable[str]:
        over = sorted({rank for each in core for rank in each.needs if rank in self.finished})
        kinds = {site.kind for site in sites}
        tag = next((clue for each, site in zip(core, sites, strict=True) if (clue := self._other_tag(each, site))), "")
        lost = next((site for each, site in zip(core, sites, strict=True) if each.operation in self.lost), None)
        if lost is not None:
            yield (
                f"Rank {lost.peer} did send it, but with an isend that it did not wait for.\n"
                "A send that is let go of before it is through is lost: keep what isend returns, and call wait()."
            )
            return
        if over:
            yield self._why_over(core, sites, over)
        elif len(core) > 1 and not tag:
            yield self._why_circle(core, kinds)
        elif not core[0].needs:
            yield "There is no other rank that could send."
        if tag:
            yield tag
        elif over and kinds & {Kind.SEND, Kind.RECV}:
            yield "Every send needs its recv, and every recv its send: count them on both sides."
        if Kind.NEW_GROUP in kinds:
            yield "All ranks have to call dist.new_group for every group, in the same order, also the ranks that are not in it."
        elif over and any(site.is_in_backward for site in sites):
            yield (
                "DDP exchanges gradients in every backward: give all ranks the same number of batches "
                "(or use the join() context of DistributedDataParallel)."
            )
        elif not over and len(core) > 1 and not tag:
            yield "" if kinds in ({Kind.SEND}, {Kind.RECV}) else "What one rank does first, another does later: put them into one order."
        elif kinds - {Kind.SEND, Kind.RECV}:
            yield "All ranks of a group have to call a collective. Is it in an if, or in a loop that is shorter on some ranks?"

    def _why_over(self, core: list[Stuck], sites: list[Site], over: list[int]) -> str:
        """Some of those that are waited for have finished."""
        begin = have(over)
        site = next(site for each, site in zip(core, sites, strict=True) if set(each.needs) & set(over))
        if site.kind is Kind.NEW_GROUP:
            return f"{begin} already finished, and never called new_group for it."
        if site.kind not in P2P:
            number = self._number(core[sites.index(site)])
            return f"{begin} already finished, and never called it: it is collective number {number} of its group."
        if site.peer == NO_PEER:
            return f"{begin} already finished: nobody is left who could send."
        other = Kind.SEND if site.kind is Kind.RECV else Kind.RECV
        done = sum(
            1
            for each in np.flatnonzero((self.columns.rank == site.peer) & (self.columns.kind == other)).tolist()
            if self.matching.site(each).peer == site.rank
        )
        verb = "sent" if other is Kind.SEND else "received"
        to = "to" if other is Kind.SEND else "from"
        return f"{begin} already finished. It {verb} {count(done, 'message') if done else 'nothing'} {to} rank {site.rank}."

    def _number(self, each: Stuck) -> int:
        return self.matching.number_in_group(int(self.matching.meeting[each.operation]))

    def _why_circle(self, core: list[Stuck], kinds: set[Kind]) -> str:
        links = [f"{each.rank} {'' if place else 'waits '}for {' and '.join(map(str, each.needs))}" for place, each in enumerate(core)]
        chain = ", ".join(links if len(links) <= _SHOWN_LINKS else [*links[: _SHOWN_LINKS - 1], "and so on"])
        is_first = not any(self._has_talked(each) for each in core)
        if kinds == {Kind.RECV} and not is_first:
            return f"{chain}: everybody waits to receive, and nobody sends.\nDoes one of them leave out a send, or send it to another rank?"
        if kinds == {Kind.SEND} and not is_first:
            return (
                f"{chain}: everybody waits to send, and nobody receives.\nDoes one of them leave out a recv, or receive from another rank?"
            )
        if kinds == {Kind.RECV}:
            return (
                f"{chain}: everybody receives first, and nobody sends.\n"
                "Let one of them send first, or start with irecv and wait after the send."
            )
        if kinds == {Kind.SEND}:
            return (
                f"{chain}: everybody sends first, and nobody receives. Even a small send waits for its receiver.\n"
                "Let one of them receive first, or start with isend and wait after the receive."
            )
        return f"{chain}: each waits for another one to go on."

    def _has_talked(self, each: Stuck) -> bool:
        """Whether a rank has sent or received anything before it got stuck."""
        mine = (
            (self.columns.rank == each.rank)
            & (self.matching.partner != NOBODY)
            & (self.columns.issued < self.columns.issued[each.operation])
        )
        return bool(mine.any())

    def _other_tag(self, each: Stuck, site: Site) -> str:
        """If the peer's other end is there, and only the tag or the group is another one."""
        if site.kind not in P2P:
            return ""
        other = Kind.SEND if site.kind is Kind.RECV else Kind.RECV
        for index in self.matching.unmatched(other):
            there = self.matching.site(index)
            if there.rank in each.needs and there.peer == site.rank and (there.tag, there.group) != (site.tag, site.group):
                verb = ("sends", "receives") if other is Kind.SEND else ("receives", "sends")
                if there.tag != site.tag:
                    ends = f"rank {there.rank} {verb[0]} with tag {there.tag}, rank {site.rank} {verb[1]} with tag {site.tag}"
                    return f"The tags differ: {ends}."
                names = [group_name(end.group, self.columns.groups) for end in (there, site)]
                ends = f"rank {there.rank} {verb[0]} on {names[0]}, rank {site.rank} {verb[1]} on {names[1]}"
                return f"The groups differ: {ends}."
        return ""
