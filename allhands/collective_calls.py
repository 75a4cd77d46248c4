"""What the arguments of a process group's methods say: which collective it is, what each rank gives and takes.

A method's name and arguments are those that PyTorch's C++ knows. Several names are one kind of operation: `allreduce` and
`allreduce_coalesced`, `_allgather_base` and its newer name `all_gather_single`. Some take an options object, or its content.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from allhands.events import NO_PEER, Kind

Tensors = Sequence[torch.Tensor]
Pieces = list[int] | int | None


class Call(NamedTuple):
    """A call of a collective: the tensors that the rank hands over and gets.

    `root`: its rank in the group. `splits`: the pieces into which given and taken fall, as lengths along dimension 0, or as the number of
    equal pieces; None if each tensor is a piece.
    """

    kind: Kind
    name: str
    given: Tensors = ()
    taken: Tensors = ()
    root: int = NO_PEER
    op: str = ""
    splits: tuple[Pieces, Pieces] = (None, None)


def pieces(tensors: Tensors, into: Pieces) -> list[tuple[int, ...]]:
    """The shapes of the pieces of what is given or taken. Several tensors that travel together count as one long one."""
    if into is None:
        return [tuple(tensor.shape) for tensor in tensors]
    if isinstance(into, int):
        return [(sum(tensor.numel() for tensor in tensors) // into,)] * into
    (tensor,) = tensors
    row = tensor[0].numel() if len(tensor) else 0
    return [(length * row,) for length in into]


def num_bytes(tensors: Tensors) -> int:
    """Their bytes; of a sparse tensor those of its indices and values."""
    return sum(
        tensor._indices().nbytes + tensor._values().nbytes if tensor.layout is torch.sparse_coo else tensor.nbytes for tensor in tensors
    )


def _list(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _flat(lists: Any) -> Tensors:
    return [tensor for each in lists for tensor in _list(each)]


def _op(opts: Any) -> str:
    """`SUM`, from an options object, a `ReduceOp`, or nothing."""
    op = getattr(opts, "reduceOp", opts)
    return "SUM" if op is None else str(getattr(op, "op", op)).rpartition(".")[2]


def _root(opts: Any) -> int:
    return getattr(opts, "rootRank", opts)


Reader = Callable[..., Call]
"""From the caller's rank in the group, the size of the group, and the method's arguments."""


def _broadcast(rank: int, size: int, tensors: Any, opts: Any, *_: Any) -> Call:
    is_root = _root(opts) == rank
    return Call(Kind.BROADCAST, "broadcast", _list(tensors) if is_root else (), () if is_root else _list(tensors), _root(opts))


def _reduce(rank: int, size: int, tensors: Any, opts: Any, op: Any = None, *_: Any) -> Call:
    taken = _list(tensors) if _root(opts) == rank else ()
    return Call(Kind.REDUCE, "reduce", _list(tensors), taken, _root(opts), _op(opts if hasattr(opts, "reduceOp") else op))


def _all_reduce(rank: int, size: int, tensors: Any, opts: Any = None, *_: Any) -> Call:
    return Call(Kind.ALL_REDUCE, "all_reduce", _list(tensors), _list(tensors), op=_op(opts))


def _all_reduce_coalesced(rank: int, size: int, tensors: Any, opts: Any = None, *_: Any) -> Call:
    return Call(Kind.ALL_REDUCE, "all_reduce_coalesced", tensors, tensors, op=_op(opts), splits=(1, 1))


def _gather(rank: int, size: int, outputs: Any, inputs: Any, opts: Any, *_: Any) -> Call:
    return Call(Kind.GATHER, "gather", _list(inputs), _flat(outputs), _root(opts))


def _scatter(rank: int, size: int, outputs: Any, inputs: Any, opts: Any, *_: Any) -> Call:
    return Call(Kind.SCATTER, "scatter", _flat(inputs), _list(outputs), _root(opts))


def _all_gather(rank: int, size: int, outputs: Any, inputs: Any, *_: Any) -> Call:
    return Call(Kind.ALL_GATHER, "all_gather", _list(inputs), _flat(outputs))


def _all_gather_single(rank: int, size: int, output: torch.Tensor, given: torch.Tensor, *_: Any) -> Call:
    return Call(Kind.ALL_GATHER, "all_gather_into_tensor", [given], [output], splits=(1, size))


def _all_gather_coalesced(rank: int, size: int, outputs: Any, inputs: Any, *_: Any) -> Call:
    return Call(Kind.ALL_GATHER, "all_gather_coalesced", inputs, _flat(outputs), splits=(1, size))


def _reduce_scatter(rank: int, size: int, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Call:
    return Call(Kind.REDUCE_SCATTER, "reduce_scatter", _flat(inputs), _list(outputs), op=_op(opts))


def _reduce_scatter_single(rank: int, size: int, output: torch.Tensor, given: torch.Tensor, opts: Any = None, *_: Any) -> Call:
    return Call(Kind.REDUCE_SCATTER, "reduce_scatter_tensor", [given], [output], op=_op(opts), splits=(size, 1))


def _reduce_scatter_coalesced(rank: int, size: int, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Call:
    return Call(Kind.REDUCE_SCATTER, "reduce_scatter_coalesced", inputs, outputs, op=_op(opts), splits=(size, 1))


def _all_to_all(rank: int, size: int, outputs: Any, inputs: Any, *_: Any) -> Call:
    return Call(Kind.ALL_TO_ALL, "all_to_all", inputs, outputs)


def _all_to_all_single(rank: int, size: int, output: torch.Tensor, given: torch.Tensor, out: Any, into: Any, *_: Any) -> Call:
    return Call(Kind.ALL_TO_ALL, "all_to_all_single", [given], [output], splits=(list(into) or size, list(out) or size))


def _barrier(rank: int, size: int, *_: Any, **__: Any) -> Call:
    return Call(Kind.BARRIER, "barrier")


READERS: dict[str, Reader] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "allgather": _all_gather,
    "allgather_coalesced": _all_gather_coalesced,
    "_allgather_base": _all_gather_single,
    "all_gather_single": _all_gather_single,
    "allgather_into_tensor_coalesced": _all_gather_coalesced,
    "all_gather_single_coalesced": _all_gather_coalesced,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
    "reduce_scatter_single_coalesced": _reduce_scatter_coalesced,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}
"""How to read the arguments of each method. Of those that a release of PyTorch does not have, none is called."""
