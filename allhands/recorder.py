"""The flight recorder, put in place: from then on every process group of this process writes down what it does.

`RecordingGroup` takes the place of PyTorch's own class for the backend, so that every group is recorded, whoever makes it, and
`get_backend` still says "gloo". It sees what the learner's program sends, and just as well what DDP, FSDP2, DTensor,
ZeroRedundancyOptimizer or pipelining do.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from allhands import recording_group
from allhands.recording_group import RecordingGroup


def _recording(inner_class: type, backend: Any, device: str) -> type:
    """A class that PyTorch takes for `inner_class`, and that records."""

    class Recording(RecordingGroup):
        Options = inner_class.Options

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(inner_class, backend, device, *args, **kwargs)

    return Recording


def install() -> None:
    """Record all process groups that will be made in this process, with the pen that has been started."""
    make = distributed_c10d._new_process_group_helper

    def make_with_members(size: int, rank: int, members: list[int], *args: Any, **kwargs: Any) -> Any:
        recording_group.members_of_next = list(members)
        return make(size, rank, members, *args, **kwargs)

    distributed_c10d._new_process_group_helper = make_with_members
    types = dist.ProcessGroup.BackendType
    for name, backend, device in (("ProcessGroupGloo", types.GLOO, "cpu"), ("ProcessGroupNCCL", types.NCCL, "cuda")):
        if hasattr(distributed_c10d, name):
            setattr(distributed_c10d, name, _recording(getattr(distributed_c10d, name), backend, device))
