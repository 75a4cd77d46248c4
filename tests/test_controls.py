"""`explore` in a real kernel: at once, the last setting wins, nothing is left, and there is something to see without a front end."""

import pytest

from kernels import kernel
from leftovers import descendants, run_folders, wait_until

SETUP = """
import time
import torch, torch.distributed as dist
from allhands import draw, explore, run

def ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(size - 1):
        for work in [dist.isend(torch.ones(1), (rank + 1) % size), dist.irecv(torch.ones(1), (rank - 1) % size)]:
            work.wait()
    if rank == 0:
        print("ranks:", size)

def show(world_size):
    job = run(ring, world_size=world_size)
    return draw(job), job.trace.ledger()

def settle(explorer):
    end = time.monotonic() + 20
    while explorer._button is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def notebook():
    folders = run_folders()
    with kernel() as it:
        reply = it.cell(SETUP)
        assert not reply.error, reply.error
        yield it
    assert wait_until(lambda: run_folders() <= folders)


def test_the_first_result_is_there_at_once_also_without_a_front_end(notebook):
    reply = notebook.cell("explorer = explore(show, world_size=(1, 5))\nexplorer")
    assert reply.shown == (
        "world_size=3\nranks: 3\n".replace("ranks", "[0] ranks") + "[picture: 3 ranks: 6 messages in 2 rounds]\n"
        "rank         messages out  messages in  bytes out  bytes in  last round\n"
        "───────────────────────────────────────────────────────────────────────\n"
        "each of 0-2             2            2          8         8           2\n"
        "total                   6            6         24        24           2"
    )
    assert reply.printed == ""
    bundle = notebook.cell("data = explorer._repr_mimebundle_()\nprint(sorted(data), data['text/html'].count('<svg'))").printed
    assert bundle == "['application/vnd.jupyter.widget-view+json', 'text/html', 'text/plain'] 1\n"


def test_moving_a_control_redraws(notebook):
    notebook.cell("explorer = explore(show, world_size=(1, 5))\nslider = explorer.children[0]\nslider.value = 5\nsettle(explorer)")
    shown = notebook.cell("print(explorer.children[1].value)").printed
    assert "Space-time picture: 5 ranks: 20 messages in 4 rounds" in shown and "[0] ranks: 5" in shown and "each of 0-4" in shown


def test_a_control_moved_ten_times_in_a_second_ends_at_the_last_setting(notebook):
    reply = notebook.cell(
        "explorer = explore(show, world_size=(1, 8))\nslider = explorer.children[0]\n"
        "for value in (1, 8, 2, 7, 3, 6, 8, 5, 8, 6):\n    slider.value = value\n    time.sleep(0.1)\n"
        "settle(explorer)\nprint(explorer.children[1].value.count('Space-time picture: 6 ranks'))"
    )
    assert not reply.error and reply.printed == "1\n"
    assert wait_until(lambda: len(descendants(notebook.pid)) == 1)  # the fork server


def test_a_newer_setting_stops_a_long_run(notebook):
    notebook.cell(
        "def slow(seconds):\n    run(time.sleep, seconds, world_size=2, timeout=60)\n    return seconds\n"
        "explorer = explore(slow, seconds=[0, 50])\nchoice = explorer.children[0]\nchoice.value = 50\ntime.sleep(0.5)\nchoice.value = 0\n"
        "start = time.monotonic()\nsettle(explorer)\nseconds = time.monotonic() - start"
    )
    assert notebook.cell("print(explorer.children[1].value)").printed.strip().endswith(">0</pre>")
    assert notebook.cell("seconds < 5").shown == "True"
    assert wait_until(lambda: len(descendants(notebook.pid)) == 1)


def test_a_run_that_fails_shows_its_error_and_no_traceback(notebook):
    reply = notebook.cell(
        "def wait():\n    dist.recv(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size())\n"
        "def fail(world_size):\n    return run(wait, world_size=world_size)\n"
        "explorer = explore(fail, world_size=(2, 4))\nexplorer"
    )
    assert not reply.error
    assert reply.shown.startswith("world_size=3\n[picture: 3 ranks: 0 messages in 0 rounds; deadlock]\nRankDeadlock: Deadlock: all 3 ranks")
    shown = notebook.cell("explorer.children[0].value = 2\nsettle(explorer)\nprint(explorer.children[1].value)").printed
    assert "RankDeadlock: Deadlock: both ranks wait" in shown and "Traceback" not in shown


def test_a_mistake_in_the_function_itself_shows_its_line(notebook):
    reply = notebook.cell("def wrong(n):\n    return 1 / n\nexplore(wrong, n=[0, 1])")
    assert reply.shown == "n=0\nZeroDivisionError: division by zero\n  This cell, line 2, in wrong\n      return 1 / n"


def test_many_moves_at_any_moment_end_at_the_last(notebook):
    """A press may come at any step of a run, also after its last message."""
    reply = notebook.cell(
        "import random\nrandom.seed(1)\nexplorer = explore(show, world_size=(1, 6))\nslider = explorer.children[0]\n"
        "for _ in range(100):\n    slider.value = random.randint(1, 6)\n    time.sleep(random.uniform(0, 0.15))\n"
        "slider.value = 4\nslider.value = 5\nsettle(explorer)\nprint(explorer.children[1].value.count('Space-time picture: 5 ranks'))"
    )
    assert not reply.error and reply.printed == "1\n"


@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyboardInterrupt", "Odd"])
def test_a_function_that_raises_anything_does_not_end_the_controls(notebook, error):
    reply = notebook.cell(
        "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\n"
        f"def fail(n):\n    if n == 1:\n        raise {error}\n    return n\n"
        "explorer = explore(fail, n=[0, 1, 2])\nfor value in (1, 2, 1, 2):\n"
        "    explorer.children[0].value = value\n    settle(explorer)\n    print(explorer.children[1].value)"
    )
    assert not reply.error
    assert reply.printed.count(error.partition("(")[0]) == 2 * 2 and reply.printed.count(">2</pre>") == 2


def test_a_figure_is_shown_once(notebook):
    source = (
        "import matplotlib.pyplot as plt\ndef plot(n):\n    figure, axes = plt.subplots()\n    axes.set_title('lines')\n    return figure\n"
        "explorer = explore(plot, n=(1, 3))\nexplorer"
    )
    assert notebook.cell(source).shown == "n=2\n[chart: lines]"
    assert notebook.cell("explorer.children[0].value = 3\nsettle(explorer)").shown == ""
    assert notebook.cell("len(plt.get_fignums())").shown == "0"


def test_printed_text_of_other_cells_is_theirs(notebook):
    reply = notebook.cell("explorer.children[0].value = 4\nrun(ring, world_size=2)\nsettle(explorer)")
    assert reply.printed == "[0] ranks: 2\n"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("explore(3, n=(1, 2))", "TypeError: explore needs a function, but got int: write explore(fn, world_size=(1, 8))"),
        ("explore(show)", "TypeError: explore needs something to move, by its name: write explore(fn, world_size=(1, 8))"),
        ("explore(show, (1, 8))", "by its name: write explore(fn, world_size=(1, 8))"),
        ("explore(show, world_size=(8, 1))", "is no control: give a range from small to large"),
        (
            "explore(show, world_size=object)",
            "is no control: give a range from small to large as (1, 8), a list, True or False, a text, or a widget",
        ),
    ],
)
def test_what_explore_cannot_use(notebook, source, told):
    assert told in notebook.cell(source).error


def test_every_kind_of_control_and_of_result(notebook):
    source = (
        "from allhands.charts import axes\n"
        "def all_kinds(number, choice, tick, words):\n"
        "    plot = axes(words); plot.plot([1, 2])\n"
        "    return draw(plot.figure), (number, choice, tick, words)\n"
        "explore(all_kinds, number=(1.0, 2.0), choice=['a', 'b'], tick=True, words='hello')"
    )
    assert notebook.cell(source).shown == ("number=1.5, choice='a', tick=True, words='hello'\n[chart: hello]\n(1.5, 'a', True, 'hello')")
