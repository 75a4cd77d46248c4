"""A message of which the receiver does not know the shape: a header goes ahead."""

import torch
import torch.distributed as dist

from allhands.exercise import Case, Mistake, Task
from allhands.parallel.messages import deliver_any_shape
from allhands.trace import Trace
from allhands.wording import count

_LONGEST_HEADER = 128


def _case(world_size: int, src: int, dst: int, *shape: int) -> Case:
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    told = f"from rank {src} to rank {dst}, x of shape {list(shape)}"
    return Case(world_size, [(x if rank == src else None, src, dst) for rank in range(world_size)], told)


def _promise(case: Case, trace: Trace) -> str:
    x = case.arguments[case.arguments[0][1]][0]
    beside = trace.ledger().total.bytes_out - x.nbytes
    if beside <= 0 and case.arguments[0][1] != case.arguments[0][2]:
        return "The result is right, but no message has told the receiver the shape."
    if beside <= _LONGEST_HEADER:
        return ""
    told = f"The result is right, but beside the {count(x.nbytes, 'byte')} of x, {count(beside, 'byte')} are sent."
    return f"{told} {_LONGEST_HEADER} are more than enough."


def _as_an_object(x, src, dst):
    rank, box = dist.get_rank(), [x]
    if src == dst == rank:
        return x
    if rank == src:
        dist.send_object_list(box, dst)
    elif rank == dst:
        dist.recv_object_list(box, src)
        return box[0]


def _guessed(x, src, dst):
    rank = dist.get_rank()
    if src == dst == rank:
        return x
    if rank == src:
        dist.send(x, dst)
    elif rank == dst:
        received = torch.empty(3)
        dist.recv(received, src)
        return received


def _asks_what_it_has_not(x, src, dst):
    rank = dist.get_rank()
    if src == dst == rank:
        return x
    if rank == src:
        dist.send(x, dst)
    elif rank == dst:
        received = torch.empty_like(x)
        dist.recv(received, src)
        return received


def _length_only(x, src, dst):
    rank = dist.get_rank()
    if src == dst == rank:
        return x
    if rank == src:
        dist.send(torch.tensor([x.numel()]), dst)
        dist.send(x.flatten(), dst)
    elif rank == dst:
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, src)
        received = torch.empty(length.item())
        dist.recv(received, src)
        return received


def _two_dimensions(x, src, dst):
    rank = dist.get_rank()
    if src == dst == rank:
        return x
    if rank == src:
        dist.send(torch.tensor(x.shape, dtype=torch.int64), dst)
        dist.send(x, dst)
    elif rank == dst:
        shape = torch.empty(2, dtype=torch.int64)
        dist.recv(shape, src)
        received = torch.empty(shape.tolist())
        dist.recv(received, src)
        return received


def _header(x, dst, shape):
    dist.send(torch.tensor([x.dim()]), dst)
    dist.send(shape, dst)
    dist.send(x, dst)


def _receive(src):
    dim = torch.empty(1, dtype=torch.int64)
    dist.recv(dim, src)
    shape = torch.empty(dim.item(), dtype=torch.int64)
    dist.recv(shape, src)
    received = torch.empty(shape.tolist())
    dist.recv(received, src)
    return received


def _floating_shape(x, src, dst):
    rank = dist.get_rank()
    if src == dst == rank:
        return x
    if rank == src:
        _header(x, dst, torch.tensor(x.shape))
    elif rank == dst:
        return _receive(src)


def _from_0_to_1(x, src, dst):
    if src == dst == dist.get_rank():
        return x
    if dist.get_rank() == 0:
        _header(x, 1, torch.tensor(x.shape, dtype=torch.int64))
    elif dist.get_rank() == 1:
        return _receive(0)


def _all_receive(x, src, dst):
    rank = dist.get_rank()
    if src == dst:
        return x if rank == src else None
    if rank == src:
        _header(x, dst, torch.tensor(x.shape, dtype=torch.int64))
        return None
    return _receive(src)


def _to_itself(x, src, dst):
    if dist.get_rank() == src:
        _header(x, dst, torch.tensor(x.shape, dtype=torch.int64))
    if dist.get_rank() == dst:
        return _receive(src)


def _both_return(x, src, dst):
    rank = dist.get_rank()
    if rank == src != dst:
        _header(x, dst, torch.tensor(x.shape, dtype=torch.int64))
    elif rank == dst != src:
        return _receive(src)
    return x


TASK = Task(
    solution=deliver_any_shape,
    cases=[_case(3, 2, 0, 2, 3), _case(2, 0, 1, 3), _case(4, 1, 3, 1, 2, 1, 2, 1), _case(2, 1, 0), _case(3, 1, 2, 0), _case(3, 1, 1, 4)],
    expected=lambda case: [
        case.arguments[case.arguments[0][1]][0] if rank == case.arguments[0][2] else None for rank in range(case.world_size)
    ],
    promise=_promise,
    mistakes=[
        Mistake(
            "It receives a shape that it guessed. The receiver cannot know it, so it has to be told in a message of its own.", _guessed
        ),
        Mistake("In rank dst, x is None: only src knows the shape. It has to be told in a message of its own.", _asks_what_it_has_not),
        Mistake("It sends how many elements there are, but not their shape: the result is flat.", _length_only),
        Mistake("It counts on two dimensions. How many there are has to be told as well.", _two_dimensions),
        Mistake("torch.tensor of an empty shape is float32, so a tensor without dimensions fails: say dtype=torch.int64.", _floating_shape),
        Mistake("It always goes from rank 0 to rank 1: send to dst, receive from src.", _from_0_to_1),
        Mistake("All ranks but src receive, but only dst is sent something.", _all_receive),
        Mistake("Where src and dst are the same rank, there is nothing to send, and a rank cannot send to itself.", _to_itself),
        Mistake(
            "send_object_list pickles the whole object, which is long, and which you should only take from those whom you trust.",
            _as_an_object,
        ),
        Mistake("Rank src returns its x too, but only dst should return it.", _both_return),
    ],
    hints=(
        "The receiver has to make a tensor before it can receive, and does not know how large. What could it receive first, "
        "that always has the same size?",
        "One number always has the same size: how many dimensions x has. After that, the receiver can make a tensor for the shape.",
        "Three messages: torch.tensor([x.dim()]), then torch.tensor(x.shape, dtype=torch.int64), then x. The receiver makes "
        "torch.empty(1, dtype=torch.int64), then one of that length, then torch.empty(shape.tolist()).",
    ),
)
