"""The stop button, and the end of kernels: a learner must never have to clean up."""

import os
import signal
import threading
import time

import pytest

from kernels import kernel
from leftovers import descendants, is_alive, is_quiet, run_folders, wait_until

HANG = (
    "%%ranks 3 --timeout 60\nprint('before')\nx = torch.zeros(1)\nif rank == 0:\n    import time\n    time.sleep(50)\ndist.recv(x, src=0)"
)
CALLED = "def hang():\n    time.sleep(50)\nrun(hang, world_size=3, timeout=60)"
BUSY = "%%ranks 3 --timeout 60\nimport itertools\nsum(itertools.count())"
STREAM = "%%ranks 3 --timeout 60 --stream\nwhile True:\n    print('again')"


@pytest.fixture
def notebook():
    folders = run_folders()
    with kernel() as it:
        assert wait_until(lambda: len(descendants(it.pid)) == 1)  # The fork server; the ranks that warmed it up have ended.
        yield it
    assert wait_until(lambda: run_folders() <= folders)


def press_stop_when_running(notebook, ranks, pressed):
    """The stop button, as soon as the ranks are well under way."""

    def press():
        wait_until(lambda: len(descendants(notebook.pid)) == 1 + ranks)
        time.sleep(0.5)
        pressed.append(time.monotonic())
        notebook.press_stop()

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def stop(notebook, source):
    """Run a cell and press stop. Returns the reply, and the seconds from the press to the reply."""
    pressed = []
    thread = press_stop_when_running(notebook, 3, pressed)
    reply = notebook.cell(source)
    seconds = time.monotonic() - pressed[0]
    thread.join()
    assert wait_until(lambda: len(descendants(notebook.pid)) == 1)
    return reply, seconds


def test_the_name_of_a_run_that_was_stopped_is_not_left_to_an_older_one(notebook):
    assert not notebook.cell("%%ranks 3 --as job\nrank").error
    stop(notebook, HANG.replace("%%ranks 3", "%%ranks 3 --as job"))
    assert notebook.cell("type(job).__name__").shown == "'RunInterrupted'"
    assert notebook.cell("from allhands import draw\ndraw(job)").shown == "[picture: 3 ranks: 0 messages in 0 rounds; stopped]"


@pytest.mark.parametrize("source", [HANG, CALLED, BUSY, STREAM])
def test_the_stop_button(notebook, source):
    reply, _ = stop(notebook, source)
    assert reply.error_name == "RunInterrupted"
    assert reply.error.startswith("RunInterrupted: The run was stopped.")
    if source == HANG:
        assert reply.printed == "[0-2] before\n"
        assert "Rank 0 of 3:\n  This cell, line 6\n      time.sleep(50)" in reply.error
        assert "Ranks 1-2 of 3:\n  This cell, line 7\n      dist.recv(x, src=0)" in reply.error
    assert notebook.cell("%%ranks 2\nrank").shown == "[0] 0\n[1] 1"


def test_the_stop_button_takes_less_than_half_a_second(notebook):
    """The best of five, when the machine is quiet: a hiccup of the machine is no fault of ours."""
    seconds = []
    while len(seconds) < 5 and is_quiet() and min(seconds, default=1) >= 0.5:
        seconds.append(stop(notebook, HANG)[1])
    assert min(seconds, default=0) < 0.5


STOP_ITSELF = """
import os, signal, threading
timer = threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGINT))
try:
    timer.start()
    run(time.sleep, 0.02)
    timer.join()
    time.sleep(0.1)
except KeyboardInterrupt:
    print("stopped")
timer.join()
"""


def test_the_stop_button_at_any_moment(notebook):
    """Also while ranks are being started, and while they are being ended.

    The cell sends the signal to itself: ipykernel loses a cell that it is interrupted in before it has begun with it.
    """
    stopped = 0
    for step in range(25):
        reply = notebook.cell(STOP_ITSELF.format(seconds=0.004 * step))
        assert reply.error == ""
        stopped += reply.printed == "stopped\n"
        after = notebook.cell("run(dist.get_rank, world_size=2).results")
        assert after.shown == "[0, 1]", (step, reply, after)
    assert stopped > 20  # Python may lose one that falls into a finaliser.
    assert wait_until(lambda: len(descendants(notebook.pid)) == 1)


def test_the_stop_button_while_others_still_work_after_a_failure(notebook):
    """The cause is known already, and it is what is told."""
    source = "%%ranks 3\nimport time\nif rank == 0: raise ValueError('the cause')\nend = time.time() + 10\nwhile time.time() < end: pass"
    thread = press_stop_when_running(notebook, 3, [])
    reply = notebook.cell(source)
    thread.join()
    assert reply.error.startswith("RankError: Rank 0 of 3 raised ValueError: the cause")


def start_hanging(notebook):
    """Send a cell that hangs, and wait until its ranks are there. Returns all processes below the kernel."""
    notebook.client.execute(HANG)
    assert wait_until(lambda: len(descendants(notebook.pid)) == 4)
    time.sleep(0.2)
    return descendants(notebook.pid)


def kill_kernel(notebook):
    os.kill(notebook.pid, signal.SIGKILL)


def restart(notebook):
    notebook.manager.restart_kernel(now=True)


def shut_down(notebook):
    """What JupyterLab does when it is closed."""
    notebook.manager.shutdown_kernel(now=False)


@pytest.mark.parametrize("end", [kill_kernel, restart, shut_down])
def test_nothing_is_left_of_a_kernel_that_ends(notebook, end):
    quiet = is_quiet()
    processes = start_hanging(notebook)
    end(notebook)
    assert wait_until(lambda: not any(map(is_alive, processes)), 2 if quiet else 10)


def test_nothing_is_left_of_an_idle_kernel(notebook):
    assert wait_until(lambda: len(descendants(notebook.pid)) == 1)
    (server,) = descendants(notebook.pid)
    quiet = is_quiet()
    kill_kernel(notebook)
    assert wait_until(lambda: not is_alive(server), 2 if quiet else 10)


def test_a_fork_of_the_kernel_does_not_keep_the_ranks_alive(notebook):
    """A process that the kernel forked in the middle of a run has copies of all its sockets."""
    notebook.cell("import os, threading\nt = threading.Thread(target=lambda: run(time.sleep, 50, world_size=3))\nt.start()")
    assert wait_until(lambda: len(descendants(notebook.pid)) == 4)
    notebook.cell("pid = os.fork()\nif pid == 0:\n    time.sleep(30)\n    os._exit(0)")
    fork = int(notebook.cell("pid").shown)
    processes = [pid for pid in descendants(notebook.pid) if pid != fork]
    assert len(processes) == 4
    quiet = is_quiet()
    kill_kernel(notebook)
    assert wait_until(lambda: not any(map(is_alive, processes)), 3 if quiet else 10)
    os.kill(fork, signal.SIGKILL)


def test_the_extension_answers_before_the_server_is_ready():
    with kernel(setup="%load_ext allhands") as it:
        assert it.cell("%%ranks 2\nrank").shown == "[0] 0\n[1] 1"
        assert it.cell("%load_ext allhands\n%reload_ext allhands").error == ""
        assert len(descendants(it.pid)) <= 3
