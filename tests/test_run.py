"""`run`: what goes in, what comes back, and from where it can be called."""

import functools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist

from allhands import RankError, run
from allhands.launch import MAX_WORLD_SIZE
from leftovers import descendants, is_alive, is_quiet, nothing_left_behind, run_folders, wait_until

pytestmark = pytest.mark.usefixtures("clean")


def add_ranks():
    x = torch.ones(2, dtype=torch.float64) * dist.get_rank()
    dist.all_reduce(x)
    return x


# --- results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 8])
def test_results_come_in_rank_order(world_size):
    job = run(lambda: (dist.get_rank(), dist.get_world_size()), world_size=world_size)
    assert job.results == [(r, world_size) for r in range(world_size)]
    assert job.output == [""] * world_size
    assert job.world_size == world_size


def test_ranks_really_talk():
    for result in run(add_ranks).results:
        assert torch.equal(result, torch.tensor([6.0, 6.0], dtype=torch.float64))


def test_closures_classes_and_lambdas_of_this_file_go_along():
    @dataclass
    class Point:
        x: int

        def moved(self):
            return Point(self.x + offset)

    offset = 10
    results = run(lambda p: Point(p.x + dist.get_rank()).moved(), Point(1), world_size=2).results
    assert results == [Point(11), Point(12)]  # a class that went there and back is the same class
    assert run(partial(max, 3), 5, world_size=1).results == [5]
    assert run(lambda: lambda x: x + offset, world_size=1).results[0](1) == 11


def test_each_rank_has_its_own_copy_of_the_arguments():
    data = torch.zeros(3)

    def fill(x):
        x += dist.get_rank() + 1
        return x

    results = run(fill, data, world_size=3).results
    assert [r.tolist() for r in results] == [[1] * 3, [2] * 3, [3] * 3]
    assert data.tolist() == [0] * 3


def test_a_class_of_the_caller_travels_between_ranks_in_object_collectives():
    program = """
    import torch.distributed as dist
    from dataclasses import dataclass
    from allhands import run

    @dataclass
    class Box:
        content: int

    def exchange():
        boxes = [None] * dist.get_world_size()
        dist.all_gather_object(boxes, Box(dist.get_rank()))
        return boxes

    print(run(exchange, world_size=2).results == [[Box(0), Box(1)]] * 2)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_large_results_from_every_rank():
    """256 MB from each of four ranks, writable and right to the last byte."""
    size = 256_000_000

    def fill():
        return torch.full((size,), dist.get_rank(), dtype=torch.uint8)

    results = run(fill).results
    assert [r.numel() for r in results] == [size] * 4
    for rank, result in enumerate(results):
        assert result[0] == result[-1] == rank and bool((result == rank).all())
        result[0] = 9


def test_results_do_not_need_shared_memory():
    """In a container /dev/shm may have 64 MB; here it has 1, and a larger result still comes back."""
    probe = ["unshare", "-rm", "true"]
    if sys.platform != "linux" or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    program = "import torch; from allhands import run; print([r.sum().item() for r in run(torch.ones, 10_000_000, world_size=2).results])"
    shell = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", shell, sys.executable, program], capture_output=True, text=True)
    assert done.stdout == "[10000000.0, 10000000.0]\n", done.stderr


def test_results_that_cannot_be_pickled_are_named_with_their_place_and_rank():
    def result():
        return {"model": [1, threading.Lock()]} if dist.get_rank() == 1 else 0

    with pytest.raises(RankError, match=r"Rank 1 of 3 cannot send the result back: result\['model'\]\[1\] is a lock"):
        run(result, world_size=3)


def test_a_result_that_cannot_be_unpickled_is_an_error_of_its_rank():
    class Trap:
        def __reduce__(self):
            return (int, ("no number",))

    with pytest.raises(RankError, match=r"Both ranks returned what cannot be unpickled here .*no number'\)$"):
        run(Trap, world_size=2)


# --- the world of now ---------------------------------------------------------------------------------------------


def test_environment_folder_and_import_path_are_those_of_the_moment(tmp_path, monkeypatch):
    (tmp_path / "freshly_written.py").write_text("value = 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ALLHANDS_TEST", "now")
    monkeypatch.delenv("HOME", raising=False)

    def look():
        import freshly_written

        return os.environ["ALLHANDS_TEST"], "HOME" in os.environ, os.getcwd(), freshly_written.value

    assert run(look, world_size=2).results == [("now", False, str(tmp_path), 1)] * 2
    (tmp_path / "freshly_written.py").write_text("value = 2222")
    assert run(look, world_size=1).results[0][3] == 2222


def test_a_folder_that_is_gone_is_said(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError, match="working directory does not exist any more"):
        run(add_ranks)


def test_ranks_draw_different_numbers_and_runs_the_same():
    def draw():
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    first, again, other = run(draw).results, run(draw).results, run(draw, seed=1).results
    assert first == again
    assert len({number for numbers in first + other for number in numbers}) == 4 * 3 * 2


def test_a_file_left_open_is_written(tmp_path):
    def leave_open():
        leave_open.kept = [open(tmp_path / "left_open", "w")]
        leave_open.kept[0].write("all of it")

    run(leave_open, world_size=1)
    assert (tmp_path / "left_open").read_text() == "all of it"


def test_ranks_stay_away_from_the_outside():
    def listening():
        addresses = subprocess.run(["ss", "-tlnpH"], capture_output=True, text=True).stdout
        return [line.split()[3] for line in addresses.splitlines() if f"pid={os.getpid()}," in line], torch.get_num_threads()

    for addresses, threads in run(listening, world_size=3).results:
        assert all(address.startswith(("127.", "[::1]")) for address in addresses)
        assert threads == 1


def test_a_rank_never_imports_ipython():
    assert run(lambda: "IPython" in sys.modules, world_size=1).results == [False]


# --- a finished rank stays ----------------------------------------------------------------------------------------


def test_a_rank_that_is_done_breaks_no_legal_message_of_others():
    def early_leaver():
        import time

        for _ in range(20):
            dist.all_reduce(torch.ones(100_000))
        if dist.get_rank() == 0:
            return 0
        time.sleep(0.2)
        x = torch.ones(4) * dist.get_rank()
        if dist.get_rank() == 1:
            dist.send(x, 2)
        else:
            dist.recv(x, 1)
        return x.sum().item()

    assert run(early_leaver, world_size=3).results == [0, 4.0, 4.0]


# --- bad arguments: said at once, and nothing is started ----------------------------------------------------------


def test_whole_numbers_of_every_kind():
    assert run(dist.get_rank, world_size=numpy.int64(2), seed=numpy.int32(3), timeout=numpy.float32(9)).results == [0, 1]


@pytest.mark.parametrize("world_size", [2.5, "4", None, True, [4]])
def test_a_world_size_that_is_no_whole_number(world_size):
    with pytest.raises(TypeError, match="world_size must be a whole number, but is "):
        run(add_ranks, world_size=world_size)


@pytest.mark.parametrize("world_size", [0, -1, 10_000, MAX_WORLD_SIZE + 1])
def test_a_world_size_out_of_range(world_size):
    with pytest.raises(ValueError, match=f"world_size must be from 1 to {MAX_WORLD_SIZE}, but is {world_size:,}"):
        run(add_ranks, world_size=world_size)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [("3", TypeError), (10**400, TypeError), (None, TypeError), (0, ValueError), (-1.0, ValueError), (float("nan"), ValueError)],
)
def test_a_timeout_that_makes_no_sense(timeout, error):
    with pytest.raises(error, match="timeout must be "):
        run(add_ranks, timeout=timeout)


def test_a_seed_that_is_no_number():
    with pytest.raises(TypeError, match="seed must be a whole number, but is 'x'"):
        run(add_ranks, seed="x")


def test_a_call_instead_of_a_function():
    with pytest.raises(
        TypeError, match=r"run needs a function to call in each rank, but got int '3'. Write run\(fn\) or run\(fn, x\), not run\(fn\(\)\)"
    ):
        run(3)


def message_of(fn, *args):
    with pytest.raises(TypeError) as caught:
        run(fn, *args)
    return str(caught.value)


def test_a_function_that_takes_other_arguments():
    def as_for_spawn(rank, world_size, steps=3):
        pass

    def add(a, b):
        pass

    assert message_of(as_for_spawn) == (
        "as_for_spawn(rank, world_size, steps=3) cannot be called with 0 arguments: missing a required argument: 'rank'. "
        "Take rank and world_size out of its brackets, begin it with rank = dist.get_rank(); world_size = dist.get_world_size(), "
        "and call run(as_for_spawn, steps=3, world_size=4)"
    )
    assert message_of(add, 2, 10, 3) == (
        "add(a, b) cannot be called with 3 arguments: too many positional arguments. "
        "Its arguments go by position, and the number of ranks by name: run(add, a, b, world_size=4)"
    )
    assert "cannot be called with 1 argument: too many" in message_of(add_ranks, 4)


def test_a_decorator_that_supplies_an_argument():
    def with_rank(function):
        @functools.wraps(function)
        def inner(*args):
            return function(dist.get_rank(), *args)

        return inner

    @with_rank
    def work(rank, factor):
        return rank * factor

    assert run(work, 10, world_size=2).results == [0, 10]


def test_an_argument_that_cannot_be_pickled_is_named():
    with pytest.raises(TypeError, match=r"argument 2\['a'\]\[1\] is a generator, and that cannot be sent to another process"):
        run(lambda x, y: None, 1, {"a": [1, (i for i in range(3))]})


def test_a_variable_that_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def uses_lock():
        return lock

    with pytest.raises(TypeError, match="uses_lock, in its variable lock is a lock, and that cannot be sent"):
        run(uses_lock)


# --- from everywhere ----------------------------------------------------------------------------------------------


def test_inside_a_rank_it_is_a_clear_error():
    with pytest.raises(RankError, match=r"run\(\) was called in rank 0 of 2: ranks cannot have ranks of their own"):
        run(lambda: run(add_ranks) if dist.get_rank() == 0 else None, world_size=2)


def test_from_a_thread_and_twice_at_once():
    results = {}

    def work(name):
        for _ in range(3):
            results[name, len(results)] = [r.tolist() for r in run(add_ranks, world_size=name).results]

    threads = [threading.Thread(target=work, args=(size,)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for (size, _), result in results.items():
        assert result == [[sum(range(size))] * 2] * size


def test_a_hundred_times_in_a_row():
    for _ in range(100):
        assert run(dist.get_rank, world_size=2).results == [0, 1]


def test_many_ranks():
    assert run(dist.get_rank, world_size=64).results == list(range(64))


PROGRAM = """
    import torch, torch.distributed as dist
    from allhands import run

    def add():
        x = torch.ones(1) * dist.get_rank()
        dist.all_reduce(x)
        print("rank", dist.get_rank())
        return x.item()

    print(run(add, world_size=3).results)
"""
SHOWN = "[0] rank 0\n[1] rank 1\n[2] rank 2\n[3.0, 3.0, 3.0]\n"


OWN_CLASSES = """
    import functools, torch, torch.distributed as dist, typing
    from dataclasses import dataclass
    from allhands import run

    step = 1

    @dataclass
    class Node:
        x: int
        next: "Node | None" = None
        count = 0

        def stepped(self):
            return self.x + step

    def change():
        Node.count += 5
        return Node(dist.get_rank())

    def exchange(x):
        boxes = [None] * dist.get_world_size()
        dist.all_gather_object(boxes, Node(dist.get_rank() + x))
        return [box.x for box in boxes], sorted(typing.get_type_hints(Node))

    class Callable:
        def __call__(self):
            return exchange(0)

    @functools.lru_cache(maxsize=50)
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    nodes = run(change, world_size=2).results
    step = 10
    print([node.stepped() for node in nodes], Node.count, Node(3).stepped(), isinstance(nodes[0], Node))
    for fn, args in ((exchange, (0,)), (functools.partial(exchange, 0), ()), (torch.no_grad()(exchange), (0,)), (Callable(), ())):
        print(run(fn, *args, world_size=2).results[1])
    print(run(fib, 30, world_size=1).results, run(lambda: fib.cache_parameters(), world_size=1).results)
"""


def test_a_programs_own_classes_and_cached_functions():
    """A class that went there and back stays what it was; ranks find classes of `__main__` whatever calls them."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(OWN_CLASSES)], capture_output=True, text=True)
    found = "([0, 1], ['next', 'x'])"
    assert done.stdout.splitlines() == ["[10, 11] 0 13 True", *[found] * 4, "[832040] [{'maxsize': 50, 'typed': False}]"], done.stderr


@pytest.mark.parametrize(("before", "after"), [("", ">&-"), ("PYTHONIOENCODING=ascii", ""), ("PYTHONWARNINGS=error PYTHONDEVMODE=1", "")])
def test_odd_terminals(tmp_path, before, after):
    """Without an output, without some characters, with every warning an error: the results are there."""
    program = tmp_path / "program.py"
    lines = [
        "from pathlib import Path",
        "from allhands import run",
        "def f(): print('é'); return 3",
        f"Path({str(tmp_path / 'out')!r}).write_text(str(run(f, world_size=2).results))",
    ]
    program.write_text("\n".join(lines))
    done = subprocess.run(["sh", "-c", f"{before} {sys.executable} {program} {after}"], capture_output=True, text=True)
    assert (tmp_path / "out").read_text() == "[3, 3]", done.stderr
    assert "ResourceWarning" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("how", ["a file without a guard", "standard input", "-c"])
def test_from_a_program(tmp_path, how):
    program = textwrap.dedent(PROGRAM)
    path = tmp_path / "program.py"
    path.write_text(program)
    command = {"a file without a guard": [str(path)], "standard input": ["-"], "-c": ["-c", program]}[how]
    stdin = program if how == "standard input" else ""
    done = subprocess.run([sys.executable, *command], input=stdin, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == (SHOWN, "", 0)


def test_a_failing_program_ends_with_the_text(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("from allhands import run\ndef f():\n    1 / 0\nrun(f, world_size=2)\n")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.endswith(
        "RankError: Both ranks raised ZeroDivisionError: division by zero\n\n  program.py, line 3, in f\n      1 / 0\n"
    )
    assert done.returncode == 1


def test_a_fork_of_the_caller_starts_a_server_of_its_own():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(run(dist.get_rank, world_size=2).results).encode())
            from allhands.forkserver import server

            server.stop()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as file:
        assert file.read() == "[0, 1]"
    os.waitpid(pid, 0)
    assert run(dist.get_rank, world_size=2).results == [0, 1]


def test_a_killed_server_is_replaced(fork_server):
    os.kill(fork_server._process.pid, signal.SIGKILL)
    assert run(dist.get_rank, world_size=2).results == [0, 1]


def test_a_server_that_cannot_start_says_why(tmp_path):
    (tmp_path / "torch").mkdir()
    program = f"""
        import torch, sys
        from allhands import run
        sys.path.insert(0, {str(tmp_path)!r})
        (lambda: open({str(tmp_path / "torch" / "__init__.py")!r}, "w").write("raise ImportError('broken torch')"))()
        run(int)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert "The next run starts a new one. Its last words: Traceback" in done.stderr
    assert "ImportError: broken torch" in done.stderr


def test_nothing_is_left_of_a_killed_caller():
    """The caller is killed in the middle of a run: its ranks, its server and its folder go."""
    program = "from allhands import run; import time; print('up', flush=True); run(time.sleep, 60, world_size=3)"
    before, quiet = run_folders(), is_quiet()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as caller:
        caller.stdout.readline()
        assert wait_until(lambda: len(descendants(caller.pid)) == 4, 20)
        left = descendants(caller.pid)
        os.kill(caller.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_alive, left)), 2 if quiet else 10)
    assert wait_until(lambda: run_folders() <= before, 2 if quiet else 10)


def test_what_a_rank_started_ends_with_it():
    def start_sleeper():
        return subprocess.Popen(["sleep", "60"]).pid

    sleepers = run(start_sleeper, world_size=2).results
    assert wait_until(lambda: not any(map(is_alive, sleepers)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the fork server")
def test_what_a_rank_started_in_a_session_of_its_own_ends_too():
    def start_sleeper():
        return subprocess.Popen(["sleep", "60"], start_new_session=True).pid

    sleepers = run(start_sleeper, world_size=2).results
    assert wait_until(lambda: not any(map(is_alive, sleepers)))


def test_a_rank_that_forks():
    """The fork has no result of its own, and its end is not the rank's."""

    def fork(fails):
        pid = os.fork()
        if pid == 0 and fails:
            raise ValueError("in the fork")
        if pid:
            os.waitpid(pid, 0)
        return pid > 0

    assert run(fork, False, world_size=2).results == [True, True]
    job = run(fork, True, world_size=2)
    assert job.results == [True, True] and "ValueError: in the fork" in job.output[0]


def test_threads_of_a_rank_are_waited_for_but_not_daemons():
    def start(daemon):
        threading.Thread(target=lambda: (time.sleep(0.3 if not daemon else 60), print("done")), daemon=daemon).start()

    assert run(start, False, world_size=2).output == ["done\n"] * 2
    assert run(start, True, world_size=2).output == [""] * 2


def test_the_check_for_leftovers_can_fail(tmp_path):
    with pytest.raises(AssertionError, match="processes left"), nothing_left_behind(patience=0.2):
        sleeper = subprocess.Popen(["sleep", "30"])
    sleeper.kill()
    sleeper.wait()
