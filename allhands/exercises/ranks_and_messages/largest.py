"""What everybody has to know in the end: along the line and back."""

import torch
import torch.distributed as dist

from allhands.exercise import Case, Mistake, Task
from allhands.parallel.messages import largest


def _case(*values: list[float]) -> Case:
    return Case(len(values), [(torch.tensor(each),) for each in values])


def _one_way(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    best, incoming = x, torch.empty_like(x)
    if rank > 0:
        dist.recv(incoming, rank - 1)
        best = torch.maximum(x, incoming)
    if rank < last:
        dist.send(best, rank + 1)
    return best


def _back_for_nothing(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    best, incoming = x, torch.empty_like(x)
    if rank > 0:
        dist.recv(incoming, rank - 1)
        best = torch.maximum(x, incoming)
    if rank < last:
        dist.send(best, rank + 1)
        dist.recv(incoming, rank + 1)
    if rank > 0:
        dist.send(best, rank - 1)
    return best


def _pythons_max(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    best, incoming = x, torch.empty_like(x)
    if rank > 0:
        dist.recv(incoming, rank - 1)
        best = max(x, incoming)
    if rank < last:
        dist.send(best, rank + 1)
        dist.recv(incoming, rank + 1)
        best = incoming
    if rank > 0:
        dist.send(best, rank - 1)
    return best


def _sum(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    best, incoming = x, torch.empty_like(x)
    if rank > 0:
        dist.recv(incoming, rank - 1)
        best = x + incoming
    if rank < last:
        dist.send(best, rank + 1)
        dist.recv(incoming, rank + 1)
        best = incoming
    if rank > 0:
        dist.send(best, rank - 1)
    return best


def _into_the_argument(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    incoming = torch.empty_like(x)
    if rank > 0:
        dist.recv(incoming, rank - 1)
        torch.maximum(x, incoming, out=x)
    if rank < last:
        dist.send(x, rank + 1)
        dist.recv(x, rank + 1)
    if rank > 0:
        dist.send(x, rank - 1)
    return x


def _everyone_to_everyone(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(world_size) if peer != rank]
    received = [torch.empty_like(x) for _ in others]
    works = [dist.isend(x, peer) for peer in others]
    works += [dist.irecv(each, peer) for each, peer in zip(received, others, strict=True)]
    for work in works:
        work.wait()
    return torch.stack([x, *received]).amax(0)


def _answer_before_the_question(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    best, incoming = x, torch.empty_like(x)
    if rank < last:
        dist.recv(incoming, rank + 1)
        dist.send(best, rank + 1)
    if rank > 0:
        dist.recv(incoming, rank - 1)
        dist.send(best, rank - 1)
    return best


def _from_zero(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    incoming = torch.zeros_like(x)
    if rank > 0:
        dist.recv(incoming, rank - 1)
    best = torch.maximum(x, incoming)
    if rank < last:
        dist.send(best, rank + 1)
        dist.recv(incoming, rank + 1)
        best = incoming
    if rank > 0:
        dist.send(best, rank - 1)
    return best


def _beyond_the_end(x):
    rank = dist.get_rank()
    best, incoming = x, torch.empty_like(x)
    if rank > 0:
        dist.recv(incoming, rank - 1)
        best = torch.maximum(x, incoming)
    dist.send(best, rank + 1)
    dist.recv(incoming, rank + 1)
    if rank > 0:
        dist.send(incoming, rank - 1)
    return incoming


def _two_laps(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return x
    right, left, best = (rank + 1) % world_size, (rank - 1) % world_size, x.clone()
    for _lap in range(2):
        if rank == 0:
            dist.send(best, right)
            dist.recv(best, left)
        else:
            incoming = torch.empty_like(x)
            dist.recv(incoming, left)
            best = torch.maximum(best, incoming)
            dist.send(best, right)
    return best


TASK = Task(
    solution=largest,
    cases=[
        _case([3.0, -9.0], [1.0, -2.0], [2.0, -5.0]),
        _case([-1.0], [-8.0], [-4.0], [-2.0]),
        _case([1.0, 5.0, 2.0], [4.0, 3.0, 6.0]),
        _case(*([float(7 * rank % 5), float(-rank)] for rank in range(5))),
        _case([-3.0, 8.0]),
        _case(*([float(rank)] for rank in range(8))),
    ],
    expected=lambda case: [torch.stack([x for (x,) in case.arguments]).amax(0)] * case.world_size,
    ledger=lambda case: {
        "messages_out": 2 * (case.world_size - 1),
        "bytes_out": 2 * (case.world_size - 1) * case.arguments[0][0].nbytes,
    },
    because="2 (n - 1) messages are enough for n ranks: n - 1 to bring the largest together, n - 1 to tell everybody.",
    mistakes=[
        Mistake(
            "It goes one way only: each rank knows the largest of those before it, and only the last one knows all. Now tell the others.",
            _one_way,
        ),
        Mistake(
            "The answer comes back along the line, but is not used: what a rank receives on the way back is the result.", _back_for_nothing
        ),
        Mistake("Python's max compares two tensors as a whole, which have no order. torch.maximum does it by element.", _pythons_max),
        Mistake("It adds. Wanted is the largest: torch.maximum(a, b).", _sum),
        Mistake("Something is written into x. Give recv a tensor of its own to fill, and torch.maximum no out=x.", _into_the_argument),
        Mistake("Everybody sends to everybody: that is n (n - 1) messages.", _everyone_to_everyone),
        Mistake(
            "Two full laps take 2n messages. Rank 0 knows the result after one: the last two messages tell nobody anything new.", _two_laps
        ),
        Mistake("It waits for the way back before it has sent anything on the way there.", _answer_before_the_question),
        Mistake(
            "It begins with zeros (or whatever torch.empty holds): wrong where all x are negative. Rank 0 begins with its x.",
            _from_zero,
        ),
        Mistake("The last rank has nobody to its right: there the way ends, and the way back begins.", _beyond_the_end),
    ],
    hints=(
        "Think of people in a line who want to know the tallest height, and may only talk to their neighbours. Two sweeps do it.",
        "On the way there: receive from rank - 1 (not rank 0), take torch.maximum with your x, send to rank + 1 (not the last rank).",
        "On the way back: receive the result from rank + 1 (not the last rank, which has it), and send it to rank - 1 (not "
        "rank 0). Return it.",
    ),
)
