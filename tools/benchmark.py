"""How long a run takes, from the call to the results, in a real kernel: `make benchmark`. Prints README.md's table.

Beside it the two ways that PyTorch itself offers: a fork of the process (what notebook launchers do) and `mp.spawn`. All of them do
the same: N processes, gloo, one all-reduce of two numbers. Measured in turn, so that a busy moment hits all. Let the machine be quiet.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZES = (4, 8)
ROUNDS = 20
SPAWN_ROUNDS = 2
PAUSE_SECONDS = 0.1


def all_reduce() -> torch.Tensor:
    """What every rank does."""
    x = torch.ones(2) * dist.get_rank()
    dist.all_reduce(x)
    return x


def private_kilobytes() -> int:
    """Memory that this rank shares with no other process."""
    all_reduce()
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))


def by_hand(rank: int, world_size: int, store: str) -> None:
    """A process without All Hands."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    all_reduce()
    dist.destroy_process_group()


def start_processes(world_size: int, method: str) -> None:
    """PyTorch's own way, with `fork` or `spawn`."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(by_hand, args=(world_size, f"{folder}/store"), nprocs=world_size, start_method=method)


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, after a pause in which what the last one left behind can end."""
    time.sleep(PAUSE_SECONDS)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure() -> None:
    """Print the table."""
    from allhands import run

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # As functions of a notebook's cells are.
    run(all_reduce)  # The fork server has started.
    rows: dict[str, list[str]] = {}

    def note(what: str, value: str) -> None:
        rows.setdefault(what, []).append(value)

    for world_size in WORLD_SIZES:
        ours, forks = [], []
        for _ in range(ROUNDS):
            ours.append(milliseconds(partial(run, all_reduce, world_size=world_size)))
            forks.append(milliseconds(partial(start_processes, world_size, "fork")))
        spawns = [milliseconds(partial(start_processes, world_size, "spawn")) for _ in range(SPAWN_ROUNDS)]
        run_ms, fork_ms, spawn_ms = map(statistics.median, (ours, forks, spawns))
        memory = max(run(private_kilobytes, world_size=world_size).results) / 1024
        note(f"`run` (median of {ROUNDS})", f"{run_ms:.0f} ms")
        note(f"fork of the process (median of {ROUNDS})", f"{fork_ms:.0f} ms")
        note(f"`mp.spawn` (median of {SPAWN_ROUNDS})", f"{spawn_ms / 1e3:.1f} s")
        note("`run` / fork", f"{run_ms / fork_ms:.2f}")
        note("`mp.spawn` / `run`", f"{spawn_ms / run_ms:.0f}")
        note("private memory of a rank (largest)", f"{memory:.1f} MiB")
    many = statistics.median(milliseconds(lambda: run(all_reduce, world_size=64)) for _ in range(3))
    print(f"| | {' | '.join(f'{world_size} ranks' for world_size in WORLD_SIZES)} |")
    print("|---|" + "---:|" * len(WORLD_SIZES))
    for what, values in rows.items():
        print(f"| {what} | {' | '.join(values)} |")
    print(f"\n64 ranks: {many / 1e3:.2f} s (median of 3). {os.cpu_count()} cores, torch {torch.__version__}.")


def main() -> None:
    """Measure in a kernel, as a notebook would."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        code = f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); import benchmark; benchmark.measure()"
        reply = client.execute_interactive(code)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    sys.exit(reply["content"]["status"] != "ok")


if __name__ == "__main__":
    main()
