"""Everybody sends and receives at the same time: the program that hangs, repaired."""

import torch
import torch.distributed as dist

from allhands.exercise import Case, Mistake, Task
from allhands.parallel.messages import shift
from allhands.trace import Trace

_MOST_ROUNDS = 3


def _case(world_size: int, *shape: int) -> Case:
    numbers = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return Case(world_size, [(numbers + 10 * rank,) for rank in range(world_size)])


def _ledger(case: Case) -> dict[str, list[int]]:
    one = 1 if case.world_size > 1 else 0
    return {"messages_out": [one] * case.world_size, "bytes_out": [one * x.nbytes for (x,) in case.arguments]}


def _promise(_case: Case, trace: Trace) -> str:
    rounds = trace.timeline.rounds
    if rounds <= _MOST_ROUNDS:
        return ""
    told = f"What the ranks return is right, but the messages go one after another: {trace.world_size} ranks take {rounds} rounds."
    return f"{told} However many ranks there are, {_MOST_ROUNDS} rounds are enough, and one is possible."


def _neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % world_size, (rank - 1) % world_size


def _send_first(x):
    right, left = _neighbours()
    received = torch.empty_like(x)
    dist.send(x, right)
    dist.recv(received, left)
    return received


def _receive_first(x):
    right, left = _neighbours()
    received = torch.empty_like(x)
    dist.recv(received, left)
    dist.send(x, right)
    return received


def _other_direction(x):
    right, left = _neighbours()
    if right == dist.get_rank():
        return x
    received = torch.empty_like(x)
    works = [dist.isend(x, left), dist.irecv(received, right)]
    for work in works:
        work.wait()
    return received


def _no_ring(x):
    rank = dist.get_rank()
    received = torch.empty_like(x)
    works = [dist.isend(x, rank + 1), dist.irecv(received, rank - 1)]
    for work in works:
        work.wait()
    return received


def _into_what_is_sent(x):
    right, left = _neighbours()
    if right == dist.get_rank():
        return x
    works = [dist.isend(x, right), dist.irecv(x, left)]
    for work in works:
        work.wait()
    return x


def _not_waited_for_the_message(x):
    right, left = _neighbours()
    if right == dist.get_rank():
        return x
    received = torch.zeros_like(x)
    sending, _receiving = dist.isend(x, right), dist.irecv(received, left)
    sending.wait()
    return received


def _not_waited_for_the_send(x):
    right, left = _neighbours()
    if right == dist.get_rank():
        return x
    received = torch.empty_like(x)
    _sending = dist.isend(x, right)
    dist.recv(received, left)
    return received


def _to_itself(x):
    right, left = _neighbours()
    received = torch.empty_like(x)
    works = [dist.isend(x, right), dist.irecv(received, left)]
    for work in works:
        work.wait()
    return received


def _one_after_another(x):
    right, left = _neighbours()
    if right == dist.get_rank():
        return x
    received = torch.empty_like(x)
    if dist.get_rank() == 0:
        dist.send(x, right)
        dist.recv(received, left)
    else:
        dist.recv(received, left)
        dist.send(x, right)
    return received


TASK = Task(
    solution=shift,
    cases=[_case(3, 2), _case(4, 3), _case(2, 2, 2), _case(5, 1), _case(8, 2), _case(1, 3)],
    expected=lambda case: [case.arguments[rank - 1][0] for rank in range(case.world_size)],
    ledger=_ledger,
    because="Each rank sends its x to one rank, and that is all.",
    promise=_promise,
    mistakes=[
        Mistake(
            "All send first, and each waits for its receiver: nobody comes to receive. isend with wait() right behind it is a send.",
            _send_first,
        ),
        Mistake("All receive first, so nobody ever comes to send.", _receive_first),
        Mistake(
            "It goes the wrong way round: x goes to the right, to rank + 1, and what you return comes from the left.", _other_direction
        ),
        Mistake("A ring has no end: to the right of the last rank is rank 0. Take (rank + 1) % world_size.", _no_ring),
        Mistake(
            "Something is written into x. If that happens while x is being sent, what the neighbour gets is left to chance.",
            _into_what_is_sent,
        ),
        Mistake("irecv only begins to receive. Until its wait() has returned, the tensor may hold anything.", _not_waited_for_the_message),
        Mistake("isend only begins to send. Until its wait() has returned, x may not have left.", _not_waited_for_the_send),
        Mistake("In a world of one, both neighbours are the rank itself, and a rank cannot send to itself.", _to_itself),
        Mistake("Rank 0 starts and all others wait for their turn, so only one message is on its way at a time.", _one_after_another),
    ],
    hints=(
        "In the picture of the deadlock, each rank waits in send for a rank that waits in send. Somebody has to be ready to receive.",
        "isend and irecv begin a message and return at once. Begin both, and wait for both after that.",
        "sending, receiving = dist.isend(x, right), dist.irecv(received, left); then sending.wait() and receiving.wait(). A "
        "world of one returns x.",
    ),
)
