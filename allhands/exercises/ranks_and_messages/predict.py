"""A prediction: what a program returns, what it sends, and how long its messages take."""

import torch
import torch.distributed as dist

from allhands.exercise import Case, Mistake, Riddle, Task
from allhands.launch import run
from allhands.output import into

WORLD_SIZE = 4


def riddle() -> float | None:
    """Send to the left, receive from the right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(rank + 1.0)  # rank 2: 0., 1., 2.
    if rank > 0:
        dist.send(x, rank - 1)
    if rank < world_size - 1:
        received = torch.empty(rank + 2)
        dist.recv(received, rank + 1)
        return received.sum().item()
    return None


def predict() -> tuple[float, int, int]:
    """Foretell: what rank 1 returns, how many bytes rank 2 sends, how many rounds it takes."""
    return 0.0 + 1.0 + 2.0, 3 * 4, 3


def what_happens(case: Case) -> list[tuple[float, int, int]]:
    """It is run, and looked up."""
    with into([]):
        job = run(riddle, world_size=WORLD_SIZE)
    ledger = job.trace.ledger()
    return [(job.results[1], ledger.ranks[2].bytes_out, ledger.total.rounds)] * case.world_size


TASK = Task(
    solution=predict,
    cases=[Case(1, [()])],
    expected=what_happens,
    riddle=Riddle(riddle, WORLD_SIZE),
    mistakes=[
        Mistake("A rank returns the sum of what it has received, not of its own x.", lambda: (1.0, 12, 3)),
        Mistake("Rank 1 receives from its right neighbour: from rank 2, whose x has three elements.", lambda: (0.0, 12, 3)),
        Mistake("The ledger counts bytes, not elements, and a float32 has four.", lambda: (3.0, 3, 3)),
        Mistake("A float32 has four bytes, not eight. torch makes float32 unless it is told otherwise.", lambda: (3.0, 24, 3)),
        Mistake("That many bytes rank 2 receives; it sends fewer.", lambda: (3.0, 16, 3)),
        Mistake(
            "They do not all send at once: a send waits until its receiver receives, and rank 1 receives only after its own "
            "send is through.",
            lambda: (3.0, 12, 1),
        ),
        Mistake(
            "They do not take turns as even and odd ranks would: only rank 0 receives at once, and each other one after its own send.",
            lambda: (3.0, 12, 2),
        ),
        Mistake("Rank 2's x has three elements: torch.arange(rank + 1.0) is 0, 1, 2 there.", lambda: (3.0, 8, 3)),
        Mistake("Only three messages are sent: rank 0 sends nothing.", lambda: (3.0, 12, 4)),
    ],
    hints=(
        "Take a sheet of paper, draw a line for each rank, and write on it what x holds there. Rank 3 has four elements: 0, 1, 2, 3.",
        "torch.arange gives float32 here, of four bytes an element. A rank's x has rank + 1 elements.",
        "A send waits for its receive. Which one is the only rank that receives at once? Whose send is through then, and "
        "what does that one do next?",
    ),
)
