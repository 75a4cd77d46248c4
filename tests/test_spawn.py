"""Where no process can be forked, ranks are spawned: the same behaviour, slower, and said once. (Windows itself is not tested here.)"""

import os
import signal
import subprocess
import sys
import textwrap

from leftovers import descendants, is_alive, run_folders, wait_until

PROGRAM = """
    import sys, time, warnings
    import torch, torch.distributed as dist
    from allhands import RankError, RankTimeout, forkserver, run

    forkserver.is_possible = False

    def add():
        x = torch.ones(1) * dist.get_rank()
        dist.all_reduce(x)
        print("rank", dist.get_rank())
        return x.item()

    def fail():
        if dist.get_rank() == 1:
            raise ValueError("bad luck")
        dist.barrier()

    def leave():
        import os
        if dist.get_rank() == 0:
            os._exit(3)
        dist.barrier()

    if __name__ == "__main__":
        if len(sys.argv) > 1:
            run(time.sleep, 60, world_size=2, timeout=90)
        with warnings.catch_warnings(record=True) as caught:
            print(run(add, world_size=3).results)
            for fn, error in ((fail, RankError), (leave, RankError), (time.sleep, RankTimeout)):
                try:
                    run(fn, *[60][: fn is time.sleep], world_size=2, timeout=1 if fn is time.sleep else 30)
                except error as e:
                    print(str(e).splitlines()[0])
        print([str(w.message) for w in caught])
"""


def write_program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return str(path)


def test_spawned_ranks_behave_as_forked_ones(tmp_path):
    folders = run_folders()
    done = subprocess.run([sys.executable, write_program(tmp_path)], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "[0] rank 0",
        "[1] rank 1",
        "[2] rank 2",
        "[3.0, 3.0, 3.0]",
        "Rank 1 of 2 raised ValueError: bad luck",
        "Rank 0 of 2 exited with code 3",
        "Not finished after 1 second.",
        "['this system cannot fork processes, so ranks take seconds to start']",
    ], done.stderr
    assert done.stderr == ""
    assert run_folders() <= folders


def test_ctrl_c_ends_spawned_ranks(tmp_path):
    with subprocess.Popen([sys.executable, write_program(tmp_path), "wait"], stderr=subprocess.PIPE, text=True) as caller:
        assert wait_until(lambda: len(descendants(caller.pid)) >= 2, 30)
        ranks = descendants(caller.pid)
        os.kill(caller.pid, signal.SIGINT)
        error = caller.stderr.read()
    assert "KeyboardInterrupt" in error or "RunInterrupted: The run was stopped." in error
    assert wait_until(lambda: not any(map(is_alive, ranks)))
