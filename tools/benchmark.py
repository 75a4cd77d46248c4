"""How long a run takes, from the call to the results, in a real kernel, and what recording costs: `make benchmark`.

Prints README.md's tables.

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
from torch.distributed import distributed_c10d

WORLD_SIZES = (4, 8)
ROUNDS = 20
SPAWN_ROUNDS = 2
PAUSE_SECONDS = 0.1
MESSAGE_ROUNDS, MESSAGES = 25, 300


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


def message_costs() -> dict[str, tuple[float, float]]:
    """Microseconds of small operations, on a group that is not recorded and on one that is: the least of rounds in turn, in one process."""
    world = dist.group.WORLD
    recording = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = type(world.inner)
    plain = dist.new_group()
    distributed_c10d.ProcessGroupGloo = recording
    rank, x, y = dist.get_rank(), torch.ones(16), torch.empty(16)

    def there_and_back(group: dist.ProcessGroup) -> None:
        if rank == 0:
            dist.send(x, 1, group=group)
            dist.recv(y, 1, group=group)
        else:
            dist.recv(y, 0, group=group)
            dist.send(x, 0, group=group)

    def exchange(group: dist.ProcessGroup) -> None:
        for work in [dist.isend(x, 1 - rank, group=group), dist.irecv(y, 1 - rank, group=group)]:
            work.wait()

    costs = {}
    for what, operation in (
        ("`send` there and `recv` back, 64 bytes", there_and_back),
        ("`isend` and `irecv` at once, 64 bytes", exchange),
        ("`all_reduce`, 64 bytes", lambda group: dist.all_reduce(x, group=group)),
    ):
        least = [float("inf")] * 2
        for _ in range(MESSAGE_ROUNDS):
            for which, group in enumerate((plain, world)):
                dist.barrier(group=plain)
                start = time.perf_counter()
                for _ in range(MESSAGES):
                    operation(group)
                least[which] = min(least[which], (time.perf_counter() - start) / MESSAGES * 1e6)
        costs[what] = (least[0], least[1])
    return costs


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
        ours, forks, unrecorded = [], [], []
        for _ in range(ROUNDS):
            ours.append(milliseconds(partial(run, all_reduce, world_size=world_size)))
            unrecorded.append(milliseconds(partial(run, all_reduce, world_size=world_size, record=False)))
            forks.append(milliseconds(partial(start_processes, world_size, "fork")))
        spawns = [milliseconds(partial(start_processes, world_size, "spawn")) for _ in range(SPAWN_ROUNDS)]
        run_ms, fork_ms, spawn_ms = map(statistics.median, (ours, forks, spawns))
        memory = max(run(private_kilobytes, world_size=world_size).results) / 1024
        note(f"`run` (median of {ROUNDS})", f"{run_ms:.0f} ms")
        note("`run` with `record=False`", f"{statistics.median(unrecorded):.0f} ms")
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
    print("\n| 2 ranks | gloo alone | recorded | |\n|---|---:|---:|---:|")
    for what, (plain, recorded) in run(message_costs, world_size=2, timeout=300).results[0].items():
        print(f"| {what} | {plain:.0f} µs | {recorded:.0f} µs | {recorded / plain - 1:+.0%} |")
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
