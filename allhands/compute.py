"""What ranks compute: the FLOPs and bytes of every operator, for `record="compute"`.

A dispatch mode sees each operator of a forward and a backward pass. It costs some microseconds a call, so it is there only when asked for.
"""

from sys import _getframe as frame_of_caller
from threading import get_ident
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from allhands import pen
from allhands.events import NO_PEER, WORLD, Kind
from allhands.pen import OVER, WAITED, ticks, with_stack

_NOT_COMPUTED = ("c10d", "_c10d_functional")
_ONLY_RESERVE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


_aten = torch.ops.aten
_FORMULAS = {  # of attention on CPUs, which flop_counter leaves out
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[_aten._scaled_dot_product_flash_attention_backward],
}


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and not leaf.is_nested]


def _are_of(tensors: list[torch.Tensor], module: str) -> bool:
    return any(type(tensor).__module__.startswith(module) for tensor in tensors)


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class Counting(TorchDispatchMode):
    """While it is on, each operator is written down: bytes read (`bytes_in`), bytes written (`bytes_out`), and FLOPs.

    FLOPs are those of matrix products, convolutions and attention, by the formulas of `torch.utils.flop_counter` (a multiply-add
    is two); other operators have none there, and are bound by their bytes. Views and reservations move nothing and are left out, and
    so is what other threads of the rank compute. `torch.compile` does not work while operators are counted.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _tensors((args, kwargs))
        if _are_of(read, "torch.distributed.tensor"):
            return NotImplemented  # A DTensor: the operators on this rank's own part come next.
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace in _NOT_COMPUTED or func.is_view or name in _ONLY_RESERVE:
            return result
        written = _tensors(result)
        if not written or _are_of(written, "torch._subclasses"):  # It asks a question; or a fake tensor asks for shapes.
            return result
        formula = _FORMULAS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
        frame = frame_of_caller(1)
        shapes = [tuple(tensor.shape) for tensor in read], [tuple(tensor.shape) for tensor in written]
        dtype = str(written[0].dtype).removeprefix("torch.")
        known = [int(Kind.COMPUTE), name, dtype, tuple(shapes[0]), tuple(shapes[1]), flops, get_ident()]
        key = with_stack(known, frame)
        site = pen.current.sites.get(key) or pen.current.site(
            key,
            frame,
            **{"kind": Kind.COMPUTE, "group": WORLD, "peer": NO_PEER, "tag": 0, "thread": get_ident()},
            **{"dtype": dtype, "reduce_op": "", "name": name, "flops": flops},
            given=shapes[1],
            taken=shapes[0],
            bytes_out=_num_bytes(written),
            bytes_in=_num_bytes(read),
        )
        view, place = pen.current.row(site)
        view[place + WAITED] = view[place + OVER] = next(ticks)
        return result
