"""Other right answers to the tasks, two or more for each: what learners write who think differently."""

import torch
import torch.distributed as dist

RIGHT = {}


def answers(task_id):
    """Enter a right answer to a task."""

    def enter(function):
        RIGHT.setdefault(task_id, []).append(function)
        return function

    return enter


@answers("ranks_and_messages.predict")
def _a_list():
    return [3.0, 12, 3]


@answers("ranks_and_messages.predict")
def _by_counting():
    return sum(range(3)), torch.arange(3.0).nbytes, 4 - 1


@answers("ranks_and_messages.deliver")
def _not_waiting(x):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    received = torch.empty_like(x)
    if rank == 0 < last:
        dist.isend(x, last).wait()
    elif rank == last > 0:
        dist.irecv(received, 0).wait()
    return (x if last == 0 else received) if rank == last else None


@answers("ranks_and_messages.deliver")
def _from_whoever_sends(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1 and rank == 0:
        dist.send(x.clone(), world_size - 1, tag=5)
    if rank < world_size - 1:
        return None
    received = x.clone()
    if world_size > 1:
        dist.recv(received, tag=5)
    return received


@answers("ranks_and_messages.largest")
def _through_rank_0(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    best = x.clone()
    if rank == 0:
        for peer in range(1, world_size):
            incoming = torch.empty_like(x)
            dist.recv(incoming, peer)
            best = torch.where(incoming > best, incoming, best)
        for peer in range(1, world_size):
            dist.send(best, peer)
    else:
        dist.send(best, 0)
        dist.recv(best, 0)
    return best


@answers("ranks_and_messages.largest")
def _two_laps(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left, incoming = (rank + 1) % world_size, (rank - 1) % world_size, x.clone()
    if rank > 0:
        dist.recv(incoming, left)
    best = torch.maximum(incoming, x)
    if world_size > 1:
        if rank < world_size - 1:
            dist.send(best, right)
            dist.recv(best, left)
        if rank != world_size - 2:
            dist.send(best, right)
    return best


@answers("ranks_and_messages.shift")
def _even_and_odd(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    received = x.clone()
    if world_size == 1:
        return received
    if rank % 2 == 0:
        dist.send(x, right)
        dist.recv(received, left)
    else:
        dist.recv(received, left)
        dist.send(x, right)
    return received


@answers("ranks_and_messages.shift")
def _in_a_batch(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size < 2:
        return x
    received = torch.zeros_like(x)
    operations = [dist.P2POp(dist.irecv, received, (rank - 1) % world_size), dist.P2POp(dist.isend, x, (rank + 1) % world_size)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@answers("ranks_and_messages.shift")
def _send_begun(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = x.clone()
    if world_size > 1:
        sending = dist.isend(x, (rank + 1) % world_size)
        dist.recv(received, (rank + world_size - 1) % world_size)
        sending.wait()
    return received


@answers("ranks_and_messages.root_barrier")
def _in_any_order():
    world_size = dist.get_world_size()
    if dist.get_rank():
        dist.send(torch.ones(1), 0)
        dist.recv(torch.empty(1), 0)
        return
    for _ in range(world_size - 1):
        dist.recv(torch.empty(1))
    for peer in reversed(range(1, world_size)):
        dist.send(torch.ones(1), peer)


@answers("ranks_and_messages.root_barrier")
def _all_begun_at_once():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = range(1, world_size) if rank == 0 else [0]
    if rank:
        dist.isend(torch.ones(1), 0).wait()
    for work in [dist.irecv(torch.empty(1), peer) for peer in others]:
        work.wait()
    if rank == 0:
        for work in [dist.isend(torch.ones(1), peer) for peer in others]:
            work.wait()


@answers("ranks_and_messages.deliver_any_shape")
def _header_of_fixed_length(x, src, dst):
    rank, header = dist.get_rank(), torch.full((9,), -1)
    if src == dst:
        return x
    if rank == src:
        header[: x.dim()] = torch.tensor(x.shape)
        dist.send(header, dst)
        dist.send(x.contiguous(), dst)
    if rank == dst:
        dist.recv(header, src)
        x = torch.empty([length for length in header.tolist() if length >= 0])
        dist.recv(x, src)
        return x
    return None


@answers("ranks_and_messages.deliver_any_shape")
def _length_by_length(x, src, dst):
    rank, number = dist.get_rank(), torch.zeros(1)
    if src == dst:
        return x
    if rank == src:
        for length in (x.dim(), *x.shape):
            dist.send(torch.tensor([float(length)]), dst)
        if x.numel():
            dist.send(x, dst)
    elif rank == dst:
        dist.recv(number, src)
        shape = []
        for _ in range(int(number)):
            dist.recv(number, src)
            shape.append(int(number))
        received = torch.empty(shape)
        if received.numel():
            dist.recv(received, src)
        return received
    return None
