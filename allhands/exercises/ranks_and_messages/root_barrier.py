"""A barrier made of messages, through rank 0."""

import time

import torch
import torch.distributed as dist

from allhands.causality import heard_from
from allhands.exercise import Case, Mistake, Task
from allhands.parallel.messages import root_barrier
from allhands.printed import rank_label
from allhands.trace import Trace


def _promise(_case: Case, trace: Trace) -> str:
    """Everybody has heard from everybody."""
    told = []
    for rank, heard in enumerate(heard_from(trace)):
        missing = set(range(trace.world_size)) - heard
        if missing:
            told.append(
                f"Rank {rank} can leave before rank{'s' if len(missing) > 1 else ''} {rank_label(missing)} came: no message told it."
            )
    return "\n".join(told)


def _only_reports():
    token = torch.zeros(1)
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            dist.recv(token, peer)
    else:
        dist.send(token, 0)


def _only_answers():
    token = torch.zeros(1)
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            dist.send(token, peer)
    else:
        dist.recv(token, 0)


def _answers_at_once():
    token = torch.zeros(1)
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            dist.recv(token, peer)
            dist.send(token, peer)
    else:
        dist.send(token, 0)
        dist.recv(token, 0)


def _waits_a_while():
    time.sleep(0.05)


def _one_lap():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1)
    if world_size == 1:
        return
    if rank == 0:
        dist.send(token, 1)
        dist.recv(token, world_size - 1)
    else:
        dist.recv(token, rank - 1)
        dist.send(token, (rank + 1) % world_size)


def _forgets_the_last():
    token, last = torch.zeros(1), dist.get_world_size() - 1
    if dist.get_rank() == 0:
        for peer in range(1, last):
            dist.recv(token, peer)
        for peer in range(1, last):
            dist.send(token, peer)
    else:
        dist.send(token, 0)
        dist.recv(token, 0)


def _all_receive_first():
    token = torch.zeros(1)
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            dist.recv(token, peer)
        for peer in range(1, dist.get_world_size()):
            dist.send(token, peer)
    else:
        dist.recv(token, 0)
        dist.send(token, 0)


def _everyone_to_everyone():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(world_size) if peer != rank]
    works = [dist.isend(torch.zeros(1), peer) for peer in others] + [dist.irecv(torch.zeros(1), peer) for peer in others]
    for work in works:
        work.wait()


def _two_laps():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1)
    for _ in range(2 if world_size > 1 else 0):
        if rank == 0:
            dist.send(token, 1)
            dist.recv(token, world_size - 1)
        else:
            dist.recv(token, rank - 1)
            dist.send(token, (rank + 1) % world_size)


def _answers_first():
    token = torch.zeros(1)
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            dist.send(token, peer)
        for peer in range(1, dist.get_world_size()):
            dist.recv(token, peer)
    else:
        dist.recv(token, 0)
        dist.send(token, 0)


def _with_itself():
    token = torch.zeros(1)
    if dist.get_rank() == 0:
        for peer in range(dist.get_world_size()):
            dist.recv(token, peer)
        for peer in range(dist.get_world_size()):
            dist.send(token, peer)
    else:
        dist.send(token, 0)
        dist.recv(token, 0)


TASK = Task(
    solution=root_barrier,
    cases=[Case(world_size, [()] * world_size) for world_size in (3, 4, 2, 5, 1, 8)],
    expected=lambda case: [None] * case.world_size,
    promise=_promise,
    ledger=lambda case: {"messages_out": 2 * (case.world_size - 1), "bytes_out": 8 * (case.world_size - 1)},
    because="Each of the other n - 1 ranks sends rank 0 one message of one float32, and gets one: 2 (n - 1) messages in all.",
    mistakes=[
        Mistake("All report to rank 0, so it knows when they have come; but it tells nobody.", _only_reports),
        Mistake("Rank 0 lets everybody go without having heard from them.", _only_answers),
        Mistake("Rank 0 answers each rank as soon as that one reports. It may answer only when all have reported.", _answers_at_once),
        Mistake("Nothing is sent, so no rank can know of another one. However long it waits, another one may be later.", _waits_a_while),
        Mistake("A single lap tells rank 0 that all have come. It takes a second one to tell the others.", _one_lap),
        Mistake("The end of a range is not in it: range(1, n - 1) leaves the last rank out.", _forgets_the_last),
        Mistake("Everybody waits to receive first, so nobody ever sends.", _all_receive_first),
        Mistake(
            "Everybody sends to everybody. It is a barrier, but n (n - 1) messages are many: go through rank 0.", _everyone_to_everyone
        ),
        Mistake("That is the barrier of the chapter, a token that goes round twice, with 2n messages. Go through rank 0.", _two_laps),
        Mistake("Rank 0 lets everybody go, and hears of them only after that. First the reports, then the answers.", _answers_first),
        Mistake("Rank 0 need not report to itself, and cannot: begin with rank 1.", _with_itself),
    ],
    hints=(
        "What has rank 0 to know before it may leave? And what have the others to know? Who can tell them?",
        "Two phases: first all others send to rank 0, which receives from each. Then rank 0 sends to each, and they receive.",
        "In rank 0 these are two loops over range(1, world_size), one after the other; in the others a send and then a "
        "recv, both with rank 0.",
    ),
)
