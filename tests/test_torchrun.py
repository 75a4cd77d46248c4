"""Scripts run as in production, by torchrun's own agents: what comes back, what a failure looks like, and that nothing stays or listens."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import psutil
import pytest

from allhands import loopback
from allhands.errors import RankError, RankTimeout, RunInterrupted
from allhands.torchrun import torchrun
from leftovers import descendants, is_alive, run_folders, wait_until

pytestmark = pytest.mark.usefixtures("clean")

TOKEN_RING = """\
On each of 2 machines:
  torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
      -m allhands.parallel.token_ring_script

[0] rank 0 of 4 (number 0 on its machine): tensor([6., 6.])
[1] rank 1 of 4 (number 1 on its machine): tensor([1., 1.])
[2] rank 2 of 4 (number 0 on its machine): tensor([3., 3.])
[3] rank 3 of 4 (number 1 on its machine): tensor([6., 6.])"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script and gives its path, which is short: it is in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "script.py").write_text(textwrap.dedent(text))
        return "script.py"

    return write


# --- all is well --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time", ["once", "again"])
def test_the_token_ring_on_two_machines(time):
    launch = torchrun("allhands.parallel.token_ring_script")
    assert repr(launch) == TOKEN_RING
    assert "".join(launch.output).count("\n") == 4


def test_the_token_ring_without_torchrun():
    """It is a script of its own, and gives no warnings."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-m", "allhands.parallel.token_ring_script"],
        capture_output=True,
        text=True,
        env={**os.environ, **world, "GLOO_SOCKET_IFNAME": loopback.interface()},
    )
    assert (done.stdout, done.stderr) == ("rank 0 of 1 (number 0 on its machine): tensor([0., 0.])\n", "")


def test_a_script_knows_nothing_of_what_is_around_it(script, monkeypatch):
    """One machine, one rank. An outer torchrun's variables do not disturb, the script is `__main__`, and its neighbours can be imported."""
    for name, value in {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1", "PET_NNODES": "5", "TORCHELASTIC_RUN_ID": "outer"}.items():
        monkeypatch.setenv(name, value)
    path = script("""
        import os, sys
        import neighbour
        print(__name__, sys.argv == [__file__], os.environ["RANK"], os.environ["WORLD_SIZE"], "PYTEST_CURRENT_TEST" in os.environ)
        print("chatter", file=sys.stderr)
        sys.exit(0)
    """)
    with open("neighbour.py", "w"):
        pass
    launch = torchrun(path, machines=1, processes=1)
    assert launch.output == ["__main__ True 0 1 False\n"]
    assert repr(launch).startswith("On one machine:\n  torchrun --nnodes 1 --nproc-per-node 1 ")
    assert "HOST:PORT \\\n      script.py\n" in repr(launch)


@pytest.mark.parametrize(
    ("program", "options", "error"),
    [
        ("nowhere.py", {}, "there is no file 'nowhere.py' in "),
        ("m", {"machines": 0}, "from 1 to 32 ranks in all, .* there are 0 × 2"),
        ("m", {"machines": 3, "processes": 11}, "there are 3 × 11"),
        ("m", {"timeout": 0}, "more than 0 seconds, but is 0"),
    ],
)
def test_arguments_that_make_no_sense(program, options, error):
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        torchrun(program, **options)


# --- ranks that fail ----------------------------------------------------------------------------------------------


def test_one_rank_raises_while_the_others_wait(script):
    path = script("""
        import torch.distributed as dist

        def work():
            if dist.get_rank() == 2:
                raise ValueError("bad luck")
            dist.barrier()

        dist.init_process_group("gloo")
        print("here", dist.get_rank())
        work()
    """)
    with pytest.raises(RankError) as caught:
        torchrun(path)
    assert str(caught.value).splitlines() == [
        "Rank 2 of 4 raised ValueError: bad luck",
        "",
        "  script.py, line 11",
        "      work()",
        "  script.py, line 6, in work",
        '      raise ValueError("bad luck")',
        "",
        "The other 3 ranks were stopped.",
    ]
    assert caught.value.output == tuple(f"here {rank}\n" for rank in range(4))


@pytest.mark.parametrize(
    ("end", "what"),
    [("os._exit(3)", "exited with code 3"), ("os.kill(os.getpid(), 9)", "died of SIGKILL"), ("sys.exit(4)", "called sys.exit(4)")],
)
def test_one_rank_ends(script, end, what):
    path = script(f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            {end}
        time.sleep(100)
    """)
    with pytest.raises(RankError) as caught:
        torchrun(path, machines=2, processes=1)
    assert str(caught.value).splitlines()[0] == f"Rank 1 of 2 {what}"


def test_a_module_that_is_not_there():
    with pytest.raises(RankError, match=r"^Both ranks raised ImportError: No module named allhands"):
        torchrun("allhands.nowhere", machines=1, processes=2)


def test_time_is_over(script):
    path = script("""
        import os, time
        if os.environ["RANK"] == "1":
            time.sleep(100)
    """)
    with pytest.raises(RankTimeout) as caught:
        torchrun(path, machines=2, processes=1, timeout=12)
    assert str(caught.value).splitlines() == [
        "Not finished after 12 seconds.",
        "",
        "Rank 0 of 2:",
        "  had finished",
        "Rank 1 of 2:",
        "  script.py, line 4",
        "      time.sleep(100)",
        "",
        "If they were only slow, give them longer: timeout=24.",
    ]


def test_time_is_over_too_soon():
    with pytest.raises(RankTimeout, match=r"^Not finished after 0.5 seconds.\n\nAll 4 ranks:\n  had not come to the script yet\n"):
        torchrun("allhands.parallel.token_ring_script", timeout=0.5)


# --- nothing stays, and nothing listens outside -------------------------------------------------------------------

# Nobody is left to find it when the keeper is killed.
DETACHED = 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)'
SLOW = f"""
    import os, subprocess, sys, time
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    {DETACHED}
    open("ready-" + os.environ["RANK"], "w").close()
    time.sleep(100)
"""


@contextmanager
def when_ready(do, world_size):
    """Does something in another thread as soon as all ranks of SLOW have come so far."""

    def is_ready():
        return sum(name.startswith("ready-") for name in os.listdir()) == world_size

    thread = threading.Thread(target=lambda: wait_until(is_ready, 60) and do())
    thread.start()
    yield
    thread.join()


def listening(pids):
    return [link.laddr.ip for pid in pids for link in psutil.Process(pid).net_connections() if link.status == psutil.CONN_LISTEN]


def test_the_stop_button_and_what_listens(script):
    seen, program = [], script(SLOW)

    def stop():
        seen.append(listening(descendants()))
        os.kill(os.getpid(), signal.SIGINT)

    with when_ready(stop, 4), pytest.raises(RunInterrupted, match="The run was stopped, on all machines"):
        torchrun(program)
    assert len(seen[0]) >= 2 and set(seen[0]) == {"127.0.0.1"}


@pytest.mark.parametrize("victim", ["caller", "keeper"])
def test_the_caller_or_the_keeper_is_killed(script, victim):
    """The `clean` fixture would not see a grandchild of a dead caller, so its processes are noted before."""
    folders, program = run_folders(), script(SLOW if victim == "caller" else SLOW.replace(DETACHED, ""))
    code = f"from allhands.torchrun import torchrun; torchrun({program!r}, machines=2, processes=1)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as caller:
        noted = []

        def kill():
            (keeper,) = psutil.Process(caller.pid).children()
            noted.extend(process.pid for process in keeper.children(recursive=True))
            os.kill(caller.pid if victim == "caller" else keeper.pid, signal.SIGKILL)

        with when_ready(kill, 2):
            error = caller.stderr.read()
    if victim == "keeper":
        assert "RuntimeError: the process that plays the machines has ended" in error
    assert len(noted) >= (6 if victim == "caller" else 4)
    assert wait_until(lambda: not any(map(is_alive, noted)), 5)
    assert wait_until(lambda: run_folders() <= folders, 5)
