"""The first message: from rank 0 to the last rank."""

import torch
import torch.distributed as dist

from allhands.exercise import Case, Mistake, Task
from allhands.parallel.messages import deliver


def _case(world_size: int, *shape: int) -> Case:
    numbers = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return Case(world_size, [(numbers * world_size + 10 * (rank + 1),) for rank in range(world_size)])


def _ledger(case: Case) -> dict[str, list[int]]:
    messages = [1 if rank == 0 < case.world_size - 1 else 0 for rank in range(case.world_size)]
    (x,) = case.arguments[0]
    return {"messages_out": messages, "bytes_out": [number * x.nbytes for number in messages]}


def _to_one_too_far(x):
    rank, last = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send(x, last)
    if rank == last:
        received = torch.empty_like(x)
        dist.recv(received, 0)
        return received


def _for_four_ranks(x):
    rank = dist.get_rank()
    if rank == 0:
        dist.send(x, 3)
    if rank == 3:
        received = torch.empty_like(x)
        dist.recv(received, 0)
        return received


def _nobody_receives(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0 and last > 0:
        dist.send(x, last)
    return x if rank == last else None


def _all_receive(x):
    if dist.get_world_size() == 1:
        return x
    if dist.get_rank() == 0:
        dist.send(x, dist.get_world_size() - 1)
        return None
    received = torch.empty_like(x)
    dist.recv(received, 0)
    return received


def _into_the_argument(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0 and last > 0:
        dist.send(x, last)
    elif rank == last and last > 0:
        dist.recv(x, 0)
    return x if rank == last else None


def _what_recv_returns(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if last == 0:
        return x
    if rank == 0:
        dist.send(x, last)
    if rank == last:
        return dist.recv(torch.empty_like(x), 0)


def _all_return(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    received = x.clone()
    if rank == 0 and last > 0:
        dist.send(x, last)
    elif rank == last and last > 0:
        dist.recv(received, 0)
    return received


def _to_itself(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        dist.send(x, last)
    if rank == last:
        received = torch.empty_like(x)
        dist.recv(received, 0)
        return received


def _one_number(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if last == 0:
        return x
    if rank == 0:
        dist.send(x, last)
    if rank == last:
        received = torch.empty(1)
        dist.recv(received, 0)
        return received


TASK = Task(
    solution=deliver,
    cases=[_case(3, 2), _case(4, 2, 3), _case(2, 5), _case(5), _case(1, 3)],
    expected=lambda case: [None] * (case.world_size - 1) + [case.arguments[0][0]],
    ledger=_ledger,
    because="It takes one message: rank 0 may send to any rank, however far away it is.",
    mistakes=[
        Mistake("Ranks count from 0, so the last one of n is n - 1: there is no rank world_size.", _to_one_too_far),
        Mistake("It only works with four ranks: ask dist.get_world_size() which rank is the last.", _for_four_ranks),
        Mistake("Rank 0 sends, and nobody receives. The last rank has an x of its own, but that is not what was sent.", _nobody_receives),
        Mistake("All ranks but 0 receive, but only one message is sent: only the last rank may wait for it.", _all_receive),
        Mistake("Something is written into x. Give recv a tensor of its own to fill: torch.empty_like(x).", _into_the_argument),
        Mistake("recv fills the tensor that you give it. What it returns is the number of the sender.", _what_recv_returns),
        Mistake("Every rank returns something, but only the last one should; the others return None.", _all_return),
        Mistake("In a world of one, rank 0 is the last rank too, and a rank cannot send to itself.", _to_itself),
        Mistake("The tensor that is to be filled must be as large as what is sent: torch.empty_like(x).", _one_number),
    ],
    hints=(
        "Three kinds of ranks do three different things: rank 0, the last one, and those between them. Begin with an if for each.",
        "The last rank needs a tensor for recv to fill. x has the right shape: torch.empty_like(x) makes another one of that shape.",
        "if rank == 0: dist.send(x, last), and if rank == last: dist.recv(received, 0). Then look at a world of one rank, "
        "where both are true.",
    ),
)
