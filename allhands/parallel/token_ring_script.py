"""The token ring as a script of its own, as in production: `torchrun` starts it once for every rank."""

import os

import torch
import torch.distributed as dist

from allhands.parallel.messages import token_ring


def main() -> None:
    """Join the other ranks, send the token round, and say what came of it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    token = token_ring(torch.ones(2) * rank)
    print(f"rank {rank} of {world_size} (number {os.environ['LOCAL_RANK']} on its machine): {token}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
