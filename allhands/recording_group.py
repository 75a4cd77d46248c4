"""A process group that writes down each operation that it is asked for, and hands it on to gloo's (or NCCL's)."""

from collections.abc import Callable
from datetime import timedelta
from sys import _getframe as frame_of_caller
from threading import get_ident
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from allhands import pen
from allhands.collective_calls import READERS, Call, Reader, num_bytes, pieces
from allhands.events import NO_PEER, Kind
from allhands.pen import with_stack
from allhands.works import CollectiveWork, Message, MessageFromAny

_SEND, _RECV = int(Kind.SEND), int(Kind.RECV)  # Plain numbers are found sooner.

members_of_next: list[int] = []
"""The ranks of the group that is being made, as this world numbers them; none, if it is a world."""

_world: list[int] = []
"""The ranks of this world, as the run numbers them. A program may leave its world, and make another one of fewer ranks."""


class RecordingGroup(dist.ProcessGroup):
    """A process group that writes down what it is asked for, and has another one do it. See `recorder.install`.

    `inner` is the backend that carries messages. PyTorch's own group around it, `whole`, carries collectives: it knows all their forms.
    """

    def __init__(self, inner_class: type, backend: Any, device: str, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._name = self._description = ""
        timeout = kwargs.get("timeout", args[0] if args else None)
        # Shorter than the run's, and than what every group has that is asked for no other.
        usual = min(pen.current.patience, default_pg_timeout.total_seconds())
        self._has_limit = isinstance(timeout, timedelta) and timeout.total_seconds() < usual
        if members_of_next:
            self._number = pen.current.group([_world[member] for member in members_of_next])
            with pen.current.waiting(self._site_of(Call(Kind.NEW_GROUP, "new_group")), self._has_limit):  # The other members have to come.
                self.inner = inner_class(store, rank, size, *args, **kwargs)
        else:
            self.inner = inner_class(store, rank, size, *args, **kwargs)
            _world[:] = range(size) if not _world else _ranks_of_the_run(store, rank, size)
            self._number = pen.current.group(_world)
        self.whole = dist.ProcessGroup(store, rank, size)
        for group in (self, self.whole):
            group._set_default_backend(backend)
            group._register_backend(torch.device(device), backend, self.inner)

    # What PyTorch's Python side asks of a backend, or of a group.

    @property
    def options(self) -> Any:
        """The backend's."""
        return self.inner.options

    def getBackendName(self) -> str:  # noqa: N802, the name is PyTorch's
        """The backend's."""
        return self.inner.name()

    def get_group_store(self) -> Any:
        """Where its ranks found each other."""
        return self.whole.get_group_store()

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self.whole._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        self.whole._set_group_desc(description)

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

    def _no_such_rank(self, peer: int) -> ValueError:
        """Gloo would wait for it for ever."""
        last = self._size - 1
        hint = "In a ring, the rank after the last is 0: (rank + 1) % world_size. A line ends there" if peer == self._size else ""
        hint = hint or ("In a ring, the rank before 0 is the last: (rank - 1) % world_size. A line begins at 0" if peer == -1 else "")
        return ValueError(f"there is no rank {peer}: ranks go from 0 to {last}{f'. {hint}' if hint else ''}")

    def _message_site(self, key: tuple[Any, ...], frame: FrameType | None, is_from_any: bool = False) -> int:
        """A new site, spelt out from its key."""
        kind, group, peer, tag, shape, dtype, thread, *_ = key
        length = shape.numel() * dtype.itemsize
        is_send = kind == _SEND
        return pen.current.site(
            key,
            frame,
            **{"kind": kind, "group": group, "peer": peer, "tag": tag, "thread": thread, "is_from_any": is_from_any},
            dtype=str(dtype).removeprefix("torch."),
            given=[shape] if is_send else [],
            taken=[] if is_send else [shape],
            bytes_out=length if is_send else 0,
            bytes_in=0 if is_send else length,
            reduce_op="",
            name=Kind(kind).label,
            has_limit=self._has_limit,
        )

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Message:
        """Hand on a send. It is written down while the data already goes."""
        if not 0 <= peer < self._size:
            raise self._no_such_rank(peer)
        work = self.inner.send(tensors, peer, tag)
        tensor = tensors[0]
        key = with_stack([_SEND, self._number, peer, tag, tensor.shape, tensor.dtype, get_ident()], frame_of_caller(2))
        current = pen.current
        return Message(work, current.row(current.sites.get(key) or self._message_site(key, frame_of_caller(2))))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Message:
        """Hand on a receive. It is written down first: what comes may end this process, if it is too large."""
        if not 0 <= peer < self._size:
            raise self._no_such_rank(peer)
        tensor = tensors[0]
        key = with_stack([_RECV, self._number, peer, tag, tensor.shape, tensor.dtype, get_ident()], frame_of_caller(2))
        current = pen.current
        row = current.row(current.sites.get(key) or self._message_site(key, frame_of_caller(2)))
        try:
            return Message(self.inner.recv(tensors, peer, tag), row)
        except BaseException:
            current.take_back(row)
            raise

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Message:
        """Hand on a receive from whoever sends."""
        tensor, frame = tensors[0], frame_of_caller(2)

        def site(peer: int) -> int:
            known = [_RECV, self._number, peer, tag, tensor.shape, tensor.dtype, get_ident(), "any"]
            key = with_stack(known, frame)
            return pen.current.sites.get(key) or self._message_site(key, frame, is_from_any=True)

        row = pen.current.row(site(NO_PEER))
        try:
            return MessageFromAny(self.inner.recv_anysource(tensors, tag), row, site)
        except BaseException:
            pen.current.take_back(row)
            raise

    # Collectives.

    def _site_of(self, call: Call) -> int:
        """The site of a collective."""
        some = call.given or call.taken
        dtype = some[0].dtype if some else ""
        shapes = [tuple([tensor.shape for tensor in tensors]) for tensors in (call.given, call.taken)]
        frame = frame_of_caller(1)
        known = [int(call.kind), call.name, self._number, call.root, call.op, *shapes, dtype, str(call.splits), get_ident()]
        key = with_stack(known, frame)
        return pen.current.sites.get(key) or pen.current.site(
            key,
            frame,
            **{"kind": call.kind, "group": self._number, "peer": call.root, "tag": 0, "thread": get_ident(), "name": call.name},
            dtype=str(dtype).removeprefix("torch."),
            given=pieces(call.given, call.splits[0]),
            taken=pieces(call.taken, call.splits[1]),
            bytes_out=num_bytes(call.given),
            bytes_in=num_bytes(call.taken),
            reduce_op=call.op,
            has_limit=self._has_limit,
        )

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that ends in an error where ranks are missing."""
        with pen.current.waiting(self._site_of(Call(Kind.BARRIER, "monitored_barrier")), has_limit=timeout is not None):
            self.inner.monitored_barrier(timeout, wait_all_ranks)


def _collective(name: str, read: Reader) -> Callable[..., CollectiveWork]:
    """The method of this name: written down first, because it may end this process if sizes differ."""

    def method(self: RecordingGroup, *args: Any, **kwargs: Any) -> CollectiveWork:
        row = pen.current.row(self._site_of(read(self._rank, self._size, *args, **kwargs)))
        try:
            return CollectiveWork(getattr(self.whole, name)(*args, **kwargs), row)
        except BaseException:
            pen.current.take_back(row)
            raise

    return method


for _name, _reader in READERS.items():
    setattr(RecordingGroup, _name, _collective(_name, _reader))


def _ranks_of_the_run(store: Any, rank: int, size: int) -> list[int]:
    """A world that is not the first: each of its ranks says which one of the run it is."""
    store.set(f"allhands-{rank}", str(pen.current.rank))
    return [int(store.get(f"allhands-{member}")) for member in range(size)]
