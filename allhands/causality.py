"""Who can know of whom: what messages carry from rank to rank, apart from their content."""

import numpy as np

from allhands.events import Kind
from allhands.matching import NOBODY
from allhands.trace import Trace


def heard_from(trace: Trace) -> list[set[int]]:
    """For each rank, the ranks of which it knows at its end that they have begun: itself, and those from which a chain of messages came.

    A message carries what its sender knew when it began to send (Lamport, "Time, clocks, and the ordering of events in a distributed
    system", 1978). That a send came to its end tells nothing: on another system it may not wait for the receiver.
    """
    columns, partner = trace.columns, trace.matching.partner
    sends = np.flatnonzero((columns.kind == Kind.SEND) & (partner != NOBODY))
    received = np.flatnonzero((columns.kind == Kind.RECV) & (partner != NOBODY) & (columns.over > 0))
    carried = {send: {int(columns.rank[send])} for send in sends.tolist()}
    is_known_before = {
        send: received[(columns.rank[received] == columns.rank[send]) & (columns.over[received] < columns.issued[send])].tolist()
        for send in carried
    }
    is_news = True
    while is_news:  # Each pass adds something, and there is an end to what can be added.
        is_news = False
        for send, known in carried.items():
            before = len(known)
            known.update(*(carried[partner[recv]] for recv in is_known_before[send]))
            is_news |= len(known) > before
    heard = [{rank} for rank in range(trace.world_size)]
    for recv in received.tolist():
        heard[columns.rank[recv]] |= carried[partner[recv]]
    return heard
