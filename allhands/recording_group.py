"""A process group that writes down each operation that it is asked for, and hands it on to gloo's (or NCCL's)."""

from collections.abc import Callable
from sys import _getframe as frame_of_caller
from threading import get_ident
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from allhands import pen
from allhands.events import NO_PEER, WORLD, Kind
from allhands.pen import OVER, WAITED, CollectiveWork, Message, MessageFromAny, ticks, with_stack


def _shapes(tensors: Any) -> tuple[torch.Size, ...]:
    return tuple([tensor.shape for tensor in tensors])


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _in_pieces(tensor: torch.Tensor, pieces: list[int] | int) -> list[tuple[int, ...]]:
    """The pieces of one tensor that stands for a list: equal ones, so many; or along dimension 0 of these lengths."""
    if isinstance(pieces, int):
        return [(tensor.numel() // pieces,)] * pieces
    row = tensor[0].numel() if len(tensor) else 0
    return [(length * row,) for length in pieces]


_SEND, _RECV = int(Kind.SEND), int(Kind.RECV)  # Plain numbers are found sooner.

members_of_next: list[int] = []
"""The ranks of the group that is being made; none, if it is the world."""


class RecordingGroup(dist.ProcessGroup):
    """A process group that writes down what it is asked for, and has another one do it. See `recorder.install`."""

    def __init__(self, inner_class: type, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(rank, size)
        self._members = members_of_next or list(range(size))
        self._own_rank = rank
        self._number = pen.current.group(self._members)
        self._name = self._description = ""
        if self._number == WORLD:
            self.inner = inner_class(store, rank, size, *args, **kwargs)
        else:
            with _Waiting(self, Kind.NEW_GROUP, "new_group"):  # The other members have to come.
                self.inner = inner_class(store, rank, size, *args, **kwargs)

    @property
    def options(self) -> Any:
        """The inner group's."""
        return self.inner.options

    def getBackendName(self) -> str:  # noqa: N802, the name is PyTorch's
        """Not gloo's: C++ would take this for a group of its own."""
        return f"recording-{self.inner.name()}"

    def _set_sequence_number_for_group(self) -> None:
        self.inner._set_sequence_number_for_group()

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        """PyTorch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """PyTorch's description of the group."""
        return self._description

    def abort(self) -> None:
        """Give up all that is under way."""
        self.inner.abort()

    def shutdown(self) -> None:
        """End it."""
        self.inner.shutdown()

    # Messages.

    def _message_site(self, key: tuple[Any, ...], frame: FrameType | None, is_from_any: bool = False) -> int:
        """A new site, spelt out from its key."""
        kind, group, peer, tag, shape, dtype, thread, *_ = key
        num_bytes = shape.numel() * dtype.itemsize
        is_send = kind == _SEND
        return pen.current.site(
            key,
            frame,
            **{"kind": kind, "group": group, "peer": peer, "tag": tag, "thread": thread, "is_from_any": is_from_any},
            dtype=str(dtype).removeprefix("torch."),
            given=[shape] if is_send else [],
            taken=[] if is_send else [shape],
            bytes_out=num_bytes if is_send else 0,
            bytes_in=0 if is_send else num_bytes,
            reduce_op="",
            name=Kind(kind).label,
        )

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Message:
        """Hand on a send. It is written down while the data already goes."""
        work = self.inner.send(tensors, peer, tag)
        tensor = tensors[0]
        key = with_stack([_SEND, self._number, peer, tag, tensor.shape, tensor.dtype, get_ident()], frame_of_caller(2))
        current = pen.current
        return Message(work, current.row(current.sites.get(key) or self._message_site(key, frame_of_caller(2))))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Message:
        """Hand on a receive. It is written down first: what comes may end this process, if it is too large."""
        tensor = tensors[0]
        key = with_stack([_RECV, self._number, peer, tag, tensor.shape, tensor.dtype, get_ident()], frame_of_caller(2))
        current = pen.current
        row = current.row(current.sites.get(key) or self._message_site(key, frame_of_caller(2)))
        return Message(self.inner.recv(tensors, peer, tag), row)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Message:
        """Hand on a receive from whoever sends."""
        tensor, frame = tensors[0], frame_of_caller(2)

        def site(peer: int) -> int:
            known = [_RECV, self._number, peer, tag, tensor.shape, tensor.dtype, get_ident(), "any"]
            key = with_stack(known, frame)
            return pen.current.sites.get(key) or self._message_site(key, frame, is_from_any=True)

        row = pen.current.row(site(NO_PEER))
        return MessageFromAny(self.inner.recv_anysource(tensors, tag), row, site)

    # Collectives. A method's name and arguments are those that C++ knows; several names are one kind of operation.

    def _collective_row(
        self,
        kind: Kind,
        name: str,
        given: Any = (),
        taken: Any = (),
        root: int = NO_PEER,
        op: Any = "",
        splits: tuple[Any, Any] | None = None,
    ) -> tuple[memoryview, int]:
        """Write down that a collective is issued. `splits`: into how many pieces a single tensor falls, or into which."""
        some = given or taken
        dtype = some[0].dtype if some else ""
        known = [kind, name, self._number, root, _op_name(op), _shapes(given), _shapes(taken), dtype, str(splits), get_ident()]
        frame = frame_of_caller(1)
        key = with_stack(known, frame)
        site = pen.current.sites.get(key)
        if site is None:
            of_given, of_taken = splits or (None, None)
            site = pen.current.site(
                key,
                frame,
                **{"kind": kind, "group": self._number, "peer": root, "tag": 0, "thread": get_ident(), "name": name},
                dtype=str(dtype).removeprefix("torch."),
                given=_in_pieces(given[0], of_given) if of_given else _shapes(given),
                taken=_in_pieces(taken[0], of_taken) if of_taken else _shapes(taken),
                bytes_out=_num_bytes(given),
                bytes_in=_num_bytes(taken),
                reduce_op=_op_name(op),
            )
        return pen.current.row(site)

    def _do(self, name: str, row: tuple[memoryview, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CollectiveWork:
        return CollectiveWork(getattr(self.inner, name)(*args, **kwargs), row)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """Of the root all others get a copy."""
        is_root = opts.rootRank == self._own_rank
        row = self._collective_row(Kind.BROADCAST, "broadcast", tensors if is_root else (), () if is_root else tensors, root=opts.rootRank)
        return self._do("broadcast", row, (tensors, opts), {})

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """The root gets the sum."""
        is_root = opts.rootRank == self._own_rank
        row = self._collective_row(Kind.REDUCE, "reduce", tensors, tensors if is_root else (), opts.rootRank, opts.reduceOp)
        return self._do("reduce", row, (tensors, opts), {})

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> CollectiveWork:
        """The root gets everybody's."""
        row = self._collective_row(Kind.GATHER, "gather", inputs, outputs[0] if outputs else (), opts.rootRank)
        return self._do("gather", row, (outputs, inputs, opts), {})

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> CollectiveWork:
        """Everybody gets a piece of the root's."""
        row = self._collective_row(Kind.SCATTER, "scatter", inputs[0] if inputs else (), outputs, opts.rootRank)
        return self._do("scatter", row, (outputs, inputs, opts), {})

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *opts: Any) -> CollectiveWork:
        """Everybody gets everybody's."""
        row = self._collective_row(Kind.ALL_GATHER, "all_gather", inputs, outputs[0])
        return self._do("allgather", row, (outputs, inputs, *opts), {})

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> CollectiveWork:
        """Everybody gets a piece of the sum."""
        row = self._collective_row(Kind.REDUCE_SCATTER, "reduce_scatter", inputs[0], outputs, op=opts.reduceOp)
        return self._do("reduce_scatter", row, (outputs, inputs, opts), {})

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *opts: Any) -> CollectiveWork:
        """Everybody gets a piece of everybody's."""
        row = self._collective_row(Kind.ALL_TO_ALL, "all_to_all", inputs, outputs)
        return self._do("alltoall", row, (outputs, inputs, *opts), {})

    def barrier(self, *opts: Any, **named: Any) -> CollectiveWork:
        """Nobody leaves before everybody has come."""
        return self._do("barrier", self._collective_row(Kind.BARRIER, "barrier"), opts, named)

    def monitored_barrier(self, *args: Any, **named: Any) -> None:
        """A barrier that ends in an error where ranks are missing."""
        with _Waiting(self, Kind.BARRIER, "monitored_barrier"):
            self.inner.monitored_barrier(*args, **named)


class _Waiting:
    """An operation that is issued and waited for in one."""

    def __init__(self, group: RecordingGroup, kind: Kind, name: str) -> None:
        self._view, self._place = group._collective_row(kind, name)

    def __enter__(self) -> None:
        self._view[self._place + WAITED] = pen.current.head[0] = next(ticks)

    def __exit__(self, *_: object) -> None:
        self._view[self._place + OVER] = pen.current.head[0] = next(ticks)


def _op_name(op: Any) -> str:
    """`SUM`, from a `ReduceOp` or what it holds."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _in_place(kind: Kind, name: str, inner: str) -> Callable[..., CollectiveWork]:
    """A method on a list of tensors that everybody has and everybody gets."""

    def method(self: RecordingGroup, tensors: list[torch.Tensor], opts: Any) -> CollectiveWork:
        return self._do(inner, self._collective_row(kind, name, tensors, tensors, op=opts.reduceOp), (tensors, opts), {})

    return method


def _single(kind: Kind, name: str, inner: str, gives_pieces: bool) -> Callable[..., CollectiveWork]:
    """A method on one output tensor and one input tensor, of which the larger holds a piece for each member."""

    def method(self: RecordingGroup, output: torch.Tensor, given: torch.Tensor, *opts: Any) -> CollectiveWork:
        members = len(self._members)
        splits = (members, 1) if gives_pieces else (1, members)
        op = opts[0].reduceOp if gives_pieces and opts else ""
        return self._do(inner, self._collective_row(kind, name, [given], [output], op=op, splits=splits), (output, given, *opts), {})

    return method


def _coalesced(kind: Kind, name: str, inner: str) -> Callable[..., CollectiveWork]:
    """A method on several tensors at once."""

    def method(self: RecordingGroup, outputs: Any, inputs: list[torch.Tensor], *opts: Any) -> CollectiveWork:
        taken = [tensor for each in outputs for tensor in (each if isinstance(each, list) else [each])]
        return self._do(inner, self._collective_row(kind, name, inputs, taken), (outputs, inputs, *opts), {})

    return method


def _all_to_all_single(
    self: RecordingGroup, output: torch.Tensor, given: torch.Tensor, out_splits: list[int], in_splits: list[int], *opts: Any
) -> CollectiveWork:
    members = len(self._members)
    splits = (list(in_splits) or members, list(out_splits) or members)
    row = self._collective_row(Kind.ALL_TO_ALL, "all_to_all_single", [given], [output], splits=splits)
    return self._do("alltoall_base", row, (output, given, out_splits, in_splits, *opts), {})


_METHODS = {
    "allreduce": _in_place(Kind.ALL_REDUCE, "all_reduce", "allreduce"),
    "allreduce_coalesced": _in_place(Kind.ALL_REDUCE, "all_reduce_coalesced", "allreduce_coalesced"),
    "_allgather_base": _single(Kind.ALL_GATHER, "all_gather_into_tensor", "_allgather_base", False),
    "_reduce_scatter_base": _single(Kind.REDUCE_SCATTER, "reduce_scatter_tensor", "_reduce_scatter_base", True),
    "alltoall_base": _all_to_all_single,
    "allgather_coalesced": _coalesced(Kind.ALL_GATHER, "all_gather_coalesced", "allgather_coalesced"),
    "allgather_into_tensor_coalesced": _coalesced(Kind.ALL_GATHER, "all_gather_coalesced", "allgather_into_tensor_coalesced"),
    "reduce_scatter_tensor_coalesced": _coalesced(Kind.REDUCE_SCATTER, "reduce_scatter_coalesced", "reduce_scatter_tensor_coalesced"),
}
_NEWER_NAMES = {  # what torch 2.13 calls some of them
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
for _name, _method in _METHODS.items():
    setattr(RecordingGroup, _name, _method)
for _name, _older in _NEWER_NAMES.items():
    setattr(RecordingGroup, _name, _METHODS[_older])
