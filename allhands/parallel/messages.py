"""Programs made of nothing but `send` and `recv`, taught in the chapter `ranks_and_messages`."""

import torch
import torch.distributed as dist


def token_ring(x: torch.Tensor) -> torch.Tensor:
    """Add up by a token that goes once round the ring: rank 0 sends its x, each rank adds its own.

    Returns what the rank has seen of the sum: of ranks 0 to r in rank r, and of all in rank 0,
    to which the token comes back.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if world_size == 1:
        return x
    token = torch.empty_like(x)
    if rank == 0:
        dist.send(x, right)
        dist.recv(token, left)
    else:
        dist.recv(token, left)
        token += x
        dist.send(token, right)
    return token


def ring_barrier() -> None:
    """Let nobody leave before everybody has come: a token goes round twice.

    The first lap gathers all ranks, the second lets them go.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if world_size == 1:
        return
    token = torch.zeros(1)
    for _lap in ("all have come", "all may go"):
        if rank == 0:
            dist.send(token, right)
            dist.recv(token, left)
        else:
            dist.recv(token, left)
            dist.send(token, right)


def deliver(x: torch.Tensor) -> torch.Tensor | None:
    """Bring rank 0's x to the last rank, which returns it. The others return None.

    Every rank has an x of the same shape. In a world of one rank nothing has to be sent.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if last == 0:
        return x
    if rank == 0:
        dist.send(x, last)
    if rank == last:
        received = torch.empty_like(x)
        dist.recv(received, 0)
        return received


def largest(x: torch.Tensor) -> torch.Tensor:
    """Find, for each element, the largest of all ranks' x; every rank returns it.

    Along the line 0, 1, 2 … and back: on the way there the largest so far is collected, on the
    way back it is told to everyone.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    best, incoming = x, torch.empty_like(x)
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


def shift(x: torch.Tensor) -> torch.Tensor:
    """Send x to the right neighbour in the ring and return the left neighbour's x."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if world_size == 1:
        return x
    received = torch.empty_like(x)
    sending, receiving = dist.isend(x, right), dist.irecv(received, left)
    sending.wait()
    receiving.wait()
    return received


def root_barrier() -> None:
    """Let nobody leave before everybody has come: all report to rank 0, then it answers all.

    A message is one float32.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1)
    if rank == 0:
        for peer in range(1, world_size):
            dist.recv(token, peer)
        for peer in range(1, world_size):
            dist.send(token, peer)
    else:
        dist.send(token, 0)
        dist.recv(token, 0)


def deliver_any_shape(x: torch.Tensor | None, src: int, dst: int) -> torch.Tensor | None:
    """Bring rank src's x, a float32 of any shape, to rank dst, which returns it.

    The others return None. Only src knows x, so its shape has to be sent before it: how many
    dimensions there are, and how long each of them is.
    """
    rank = dist.get_rank()
    if src == dst == rank:
        return x
    if rank == src:
        dist.send(torch.tensor([x.dim()]), dst)
        dist.send(torch.tensor(x.shape, dtype=torch.int64), dst)
        dist.send(x, dst)
    elif rank == dst:
        dim = torch.empty(1, dtype=torch.int64)
        dist.recv(dim, src)
        shape = torch.empty(dim.item(), dtype=torch.int64)
        dist.recv(shape, src)
        received = torch.empty(shape.tolist())
        dist.recv(received, src)
        return received
