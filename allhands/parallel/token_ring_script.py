"""The token ring as a script, as it starts on a cluster. On each of two machines, with the address of one of them:

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m allhands.parallel.token_ring_script
"""

import os

import torch
import torch.distributed as dist

from allhands.parallel.messages import token_ring


def main() -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen = token_ring(torch.ones(1)).item()
    print(f"rank {rank} of {world_size}, number {os.environ['LOCAL_RANK']} on its machine: the token says {seen:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
