"""The replay in rounds, the ledger, and the judge of deadlocks: against hand-drawn schedules, and against a simulation of any program."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.deadlock import find_deadlock
from allhands.events import NO_PEER, ROW, Kind, RankFile
from allhands.trace import Trace

# A program is a list for each rank, of steps such as ("isend", 1), ("irecv", 0), ("wait", 0), ("send", 1), ("recv", 0), ("barrier",).


def site(kind, peer):
    fields = {"kind": kind, "group": 0, "peer": peer, "tag": 0, "dtype": "uint8", "thread": 1, "place": 0, "is_in_backward": False}
    shapes = {"given": [[1]] if kind == Kind.SEND else [], "taken": [[1]] if kind == Kind.RECV else []}
    return fields | shapes | {"bytes_out": int(kind == Kind.SEND), "bytes_in": int(kind == Kind.RECV), "reduce_op": "", "name": "x"}


KINDS = {"send": Kind.SEND, "isend": Kind.SEND, "recv": Kind.RECV, "irecv": Kind.RECV, "barrier": Kind.BARRIER}


class Simulated:
    """A program that is carried out by the book: a message passes when both its ends are there, whatever the order of ranks."""

    def __init__(self, programs):
        self.programs = programs
        self.size = len(programs)
        self.rows = [[] for _ in programs]
        self.sites = [[] for _ in programs]
        self.tick = [0] * self.size
        self.place = [0] * self.size
        self.waiting = [None] * self.size
        self.posted = {}
        self.barriers = [0] * self.size
        while sum(self.step(rank) for rank in range(self.size)):
            pass

    def next_tick(self, rank):
        self.tick[rank] += 1
        return self.tick[rank]

    def post(self, rank, name, peer):
        kind = KINDS[name]
        self.rows[rank].append([len(self.sites[rank]) + 1, self.next_tick(rank), 0, 0])
        self.sites[rank].append(site(kind, peer))
        if kind == Kind.BARRIER:
            self.barriers[rank] += 1
            return ("barrier", self.barriers[rank], len(self.rows[rank]) - 1)
        channel = (kind, rank, peer)
        self.posted[channel] = self.posted.get(channel, 0) + 1
        return (channel, self.posted[channel], len(self.rows[rank]) - 1)

    def is_done(self, rank, handle):
        channel, number, _ = handle
        if channel == "barrier":
            return min(self.barriers) >= number
        kind, _, peer = channel
        other = Kind.RECV if kind == Kind.SEND else Kind.SEND
        return self.posted.get((other, peer, rank), 0) >= number

    def step(self, rank):
        """One step of a rank, if it can take one."""
        if self.waiting[rank] is not None:
            if not self.is_done(rank, self.waiting[rank]):
                return False
            self.rows[rank][self.waiting[rank][2]][3] = self.next_tick(rank)
            self.waiting[rank] = None
            return True
        if self.place[rank] == len(self.programs[rank]):
            return False
        name, *peer = self.programs[rank][self.place[rank]]
        self.place[rank] += 1
        if name == "wait":
            handle = self.handles(rank)[peer[0]]
            if self.rows[rank][handle[2]][2]:
                return True
        else:
            handle = self.post(rank, name, peer[0] if peer else NO_PEER)
            self.handles(rank).append(handle)
            if name.startswith("i"):
                return True
        self.rows[rank][handle[2]][2] = self.next_tick(rank)
        self.waiting[rank] = handle
        return True

    def handles(self, rank):
        self._handles = getattr(self, "_handles", None) or [[] for _ in self.programs]
        return self._handles[rank]

    @property
    def finished(self):
        return {rank for rank in range(self.size) if self.waiting[rank] is None}

    def trace(self, tmp_path):
        files = []
        for rank in range(self.size):
            rows = np.array([(0, 0, 0, 0), *map(tuple, self.rows[rank])], ROW)
            rows.tofile(tmp_path / "rows")
            tables = [{"group": list(range(self.size))}, {"place": []}, *({"site": fields} for fields in self.sites[rank])]
            (tmp_path / "tables").write_text("".join(json.dumps(line) + "\n" for line in tables))
            files.append(RankFile.read(str(tmp_path / "rows"), str(tmp_path / "tables")))
        return Trace(files)


def spans(trace):
    """Each operation as (rank, kind, when its data moved, how long it was waited for before)."""
    line = trace.timeline
    waits = np.nan_to_num(line.began - line.wait_began)
    return [
        (event.site.rank, event.site.kind.label, float(line.began[index]), float(max(waits[index], 0))) for index, event in enumerate(trace)
    ]


def test_one_message(tmp_path):
    trace = Simulated([[("send", 1)], [("recv", 0)]]).trace(tmp_path)
    assert spans(trace) == [(0, "send", 0, 0), (1, "recv", 0, 0)]
    assert trace.timeline.rounds == 1


def exchange(right, left, first=0):
    """Begin a send to one and a receive from another, then wait for both."""
    return [("isend", right), ("irecv", left), ("wait", first), ("wait", first + 1)]


def test_a_ring_of_three_in_two_rounds(tmp_path):
    programs = [[*exchange((rank + 1) % 3, (rank - 1) % 3), *exchange((rank + 1) % 3, (rank - 1) % 3, 2)] for rank in range(3)]
    trace = Simulated(programs).trace(tmp_path)
    assert sorted({(kind, began) for _, kind, began, _ in spans(trace)}) == [("recv", 0), ("recv", 1), ("send", 0), ("send", 1)]
    assert trace.timeline.rounds == 2


def test_a_port_takes_one_message_at_a_time(tmp_path):
    """Three ranks send to rank 0 at once: one after the other, the lowest first, while the others wait."""
    programs = [
        [("irecv", 1), ("irecv", 2), ("irecv", 3), ("wait", 0), ("wait", 1), ("wait", 2)],
        [("send", 0)],
        [("send", 0)],
        [("send", 0)],
    ]
    trace = Simulated(programs).trace(tmp_path)
    assert [span for span in spans(trace) if span[1] == "send"] == [(1, "send", 0, 0), (2, "send", 1, 1), (3, "send", 2, 2)]


def test_both_directions_at_once(tmp_path):
    assert Simulated([exchange(1, 1), exchange(0, 0)]).trace(tmp_path).timeline.rounds == 1


def test_a_chain_is_as_long_as_its_messages(tmp_path):
    programs = [[("send", 1)], [("recv", 0), ("send", 2)], [("recv", 1), ("send", 3)], [("recv", 2)]]
    trace = Simulated(programs).trace(tmp_path)
    assert trace.timeline.rounds_of_ranks == [1, 2, 3, 3]
    assert [wait for rank, kind, _, wait in spans(trace) if kind == "recv"] == [0, 1, 2]


def test_a_barrier_waits_for_the_last(tmp_path):
    trace = Simulated([[("send", 1), ("barrier",)], [("recv", 0), ("barrier",)], [("barrier",)]]).trace(tmp_path)
    assert [span for span in spans(trace) if span[1] == "barrier"] == [(0, "barrier", 1, 0), (1, "barrier", 1, 0), (2, "barrier", 1, 1)]


def test_what_queues_at_two_ports_starts_when_both_are_free(tmp_path):
    """2 → 1 queues at 1's entrance behind 0 → 1; 2 → 3 goes first, though it was issued later."""
    programs = [[("isend", 1), ("wait", 0)], [("irecv", 0), ("irecv", 2), ("wait", 0), ("wait", 1)],
                [("isend", 1), ("isend", 3), ("wait", 0), ("wait", 1)], [("recv", 2)]]  # fmt: skip
    trace = Simulated(programs).trace(tmp_path)
    sends = {(rank, began) for rank, kind, began, _ in spans(trace) if kind == "send"}
    assert sends == {(0, 0), (2, 0), (2, 1)} and trace.timeline.rounds == 2


STEPS = st.one_of(
    st.tuples(st.sampled_from(["send", "recv", "isend", "irecv"]), st.integers(1, 3)), st.just(("barrier",)), st.tuples(st.just("wait"))
)


@settings(deadline=None, max_examples=300)
@given(programs=st.lists(st.lists(STEPS, max_size=6), min_size=2, max_size=4))
def test_the_judge_agrees_with_a_simulation_of_any_program(programs, tmp_path_factory):
    """A rank is told to be stuck if and only if no order of events would let it go on."""
    size = len(programs)
    concrete = []
    for rank, program in enumerate(programs):
        begun, steps = 0, []
        for name, *arguments in program:
            if name == "wait":
                if begun:
                    steps.append(("wait", begun - 1))
                continue
            if name == "barrier":
                steps.append(("barrier",))
            else:
                steps.append((name, (rank + 1 + (arguments[0] - 1) % (size - 1)) % size))
            begun += 1
        concrete.append(steps)
    done = Simulated(concrete)
    trace = done.trace(tmp_path_factory.mktemp("program"))
    stuck = set(range(size)) - done.finished
    found = find_deadlock(trace.columns, trace.matching, done.finished)
    assert (found is not None) == bool(stuck)
    if found is not None:
        assert {each.rank for each in found.stuck} <= stuck
        assert all(set(each.needs) <= stuck | done.finished for each in found.stuck)
        assert {rank for each in found.stuck for rank in each.needs if rank in stuck} <= {each.rank for each in found.stuck}
        assert found.why and found.standing.startswith("Deadlock: ")
    if not stuck:  # Whoever has met somebody has a time; and nobody moves two messages in one direction at once.
        line = trace.timeline
        met = trace.matching.partner >= 0
        assert not np.isnan(line.ended[met]).any()
        for kind in (Kind.SEND, Kind.RECV):
            for rank in range(size):
                begins = line.began[met & (trace.columns.kind == kind) & (trace.columns.rank == rank)]
                assert len(set(begins)) == len(begins)


@settings(deadline=None, max_examples=200)
@given(programs=st.lists(st.lists(STEPS, max_size=6), min_size=2, max_size=3), moving=st.integers(0, 2))
def test_a_rank_that_still_moves_is_never_part_of_a_deadlock(programs, moving, tmp_path_factory):
    """Whoever needs only such a rank is not stuck."""
    size = len(programs)
    concrete = [
        [(step[0], (rank + 1 + (step[1] - 1) % (size - 1)) % size) if len(step) == 2 else ("barrier",) for step in program]
        for rank, program in enumerate(programs)
    ]
    done = Simulated(concrete)
    moving %= size
    trace = done.trace(tmp_path_factory.mktemp("program"))
    trace.columns.is_waiting[trace.columns.rank == moving] = False
    found = find_deadlock(trace.columns, trace.matching, done.finished - {moving})
    if found is not None:
        assert moving not in found.ranks


# --- the ledger ---------------------------------------------------------------------------------------------------


def test_the_ledger_as_text_html_and_numbers(tmp_path):
    programs = [
        exchange((rank + 1) % 3, (rank - 1) % 3) + ([("send", 1)] if rank == 0 else [("recv", 0)] if rank == 1 else []) for rank in range(3)
    ]
    ledger = Simulated(programs).trace(tmp_path).ledger()
    assert repr(ledger) == (
        "rank   messages out  messages in  bytes out  bytes in  last round\n"
        "─────────────────────────────────────────────────────────────────\n"
        "0                 2            1          2         1           2\n"
        "1                 1            2          1         2           2\n"
        "2                 1            1          1         1           1\n"
        "total             4            4          4         4           2"
    )
    told = ledger.to_dict()
    assert told["total"]["bytes_out"] == 4 and told["ranks"][1]["messages_in"] == 2 and told["kinds"]["send"]["calls"] == 4
    html = ledger._repr_html_()
    assert html.count("<tr") == 5 and "messages out" in html and "script" not in html


def test_ranks_with_equal_numbers_are_one_row(tmp_path):
    ledger = Simulated([[("barrier",)], [("barrier",)], [("barrier",)]]).trace(tmp_path).ledger()
    assert "each of 0-2            1          0         0           1" in repr(ledger)


def test_the_ledger_of_nothing(tmp_path):
    ledger = Simulated([[], []]).trace(tmp_path).ledger()
    assert ledger.total.bytes_out == ledger.total.rounds == 0
    assert "each of 0-1" in repr(ledger)


@pytest.mark.parametrize("number", [1, 5000])
def test_a_flood_at_one_port_takes_a_round_each(tmp_path, number):
    flood = [("isend", 1)] * number + [("wait", place) for place in range(number)]
    drain = [("irecv", 0)] * number + [("wait", place) for place in range(number)]
    assert Simulated([flood, drain]).trace(tmp_path).timeline.rounds == number
