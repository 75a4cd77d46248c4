"""What a run says when ranks fail: the cause and nothing but the cause, with the learner's line, the same text every time."""

import ctypes
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist

from allhands import RankError, RankTimeout, run
from leftovers import is_alive, wait_until

pytestmark = pytest.mark.usefixtures("clean")


def text_of(fn, *args, world_size=3, error=RankError, **options):
    """The error's text, with the line numbers of this file taken out."""
    with pytest.raises(error) as caught:
        run(fn, *args, world_size=world_size, **options)
    lines = str(caught.value).splitlines()
    return [line.rpartition(", line ")[0] or line if "test_failures.py, line " in line else line for line in lines]


THE_OTHERS = ["", "The other 2 ranks were stopped."]
HERE = "  tests/test_failures.py"


def test_one_raises_while_the_others_wait():
    def fail():
        if dist.get_rank() == 1:
            raise ValueError("bad luck")
        dist.barrier()

    expected = ["Rank 1 of 3 raised ValueError: bad luck", "", HERE, '      raise ValueError("bad luck")', *THE_OTHERS]
    assert text_of(fail) == expected


def test_all_raise_the_same():
    assert text_of(lambda: {}["x"])[0] == "All 3 ranks raised KeyError: 'x'"
    assert text_of(lambda: {}["x"], world_size=1)[0] == "The only rank raised KeyError: 'x'"
    assert len(text_of(lambda: {}["x"])) == 4  # and nobody is said to have been stopped


def test_some_raise_the_same_and_one_another():
    def fail():
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), 1)
        raise ValueError("odd" if dist.get_rank() % 2 else "even")

    text = text_of(fail, world_size=5)
    assert text[0] == "Ranks 1,3 of 5 raised ValueError: odd"
    assert text[-4:] == ["And also:", "  ranks 2,4 of 5 raised ValueError: even", "", "The other rank was stopped."]


def test_many_different_causes_are_cut_short():
    def fail():
        raise ValueError(dist.get_rank())

    assert text_of(fail, world_size=8)[5:] == [
        "And also:",
        *(f"  rank {r} of 8 raised ValueError: {r}" for r in range(1, 5)),
        "  and 3 more",
    ]


def test_the_frames_lead_to_the_readers_own_line_and_not_into_libraries():
    def inner(model):
        return model(torch.ones(3))

    def outer():
        return inner(torch.nn.Linear(4, 1))

    text = text_of(outer)
    assert [line for line in text[1:] if line] == [
        HERE,
        "      return inner(torch.nn.Linear(4, 1))",
        HERE,
        "      return model(torch.ones(3))",
    ]


def test_a_deep_recursion_is_told_in_short():
    def again():
        return again()

    text = text_of(again)
    assert text[0] == "All 3 ranks raised RecursionError: maximum recursion depth exceeded"
    assert "  … more calls like these …" in text and len(text) < 20


def test_what_an_exception_was_raised_from_and_its_notes():
    def fail():
        try:
            {}["a"]
        except KeyError as error:
            second = RuntimeError("no such setting")
            second.add_note("Settings are a, b, c.")
            raise second from error

    assert text_of(fail)[:3] == ["All 3 ranks raised RuntimeError: no such setting", "Settings are a, b, c.", "raised from KeyError: 'a'"]


@pytest.mark.parametrize(("code", "shown"), [(2, "2"), (0, "0"), (None, ""), ("no data", "'no data'")])
def test_sys_exit(code, shown):
    def leave():
        if dist.get_rank() == 1:
            sys.exit(code)
        dist.barrier()

    text = text_of(leave)
    assert text[0] == f"Rank 1 of 3 called sys.exit({shown})"
    assert text[-4:] == ["", "A rank ends by returning: what it returns is its result.", *THE_OTHERS]


@pytest.mark.parametrize("code", [0, 3])
def test_os_exit(code):
    def leave():
        if dist.get_rank() == 1:
            os._exit(code)
        dist.barrier()

    hint = "A rank ends by returning: os._exit() takes its result with it."
    assert text_of(leave) == [f"Rank 1 of 3 exited with code {code}", "", hint, *THE_OTHERS]


def test_a_segmentation_fault_is_told_with_its_line():
    def crash():
        if dist.get_rank() == 2:
            ctypes.string_at(0)
        dist.barrier()

    title = "Rank 2 of 3 died of a segmentation fault (SIGSEGV)"
    assert text_of(crash) == [title, "", HERE, "      ctypes.string_at(0)", *THE_OTHERS]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGBUS])
def test_a_signal_from_outside(number):
    def be_killed():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), number)
        dist.barrier()

    text = text_of(be_killed)
    assert text[0].startswith("Rank 0 of 3 died of ") and number.name in text[0]
    assert ("Did memory run out" in "".join(text)) == (number == signal.SIGKILL)
    assert text[-2:] == THE_OTHERS


def test_the_errors_that_a_death_causes_in_others_are_not_causes():
    """Rank 0 sees its connection to rank 1 close, and raises an error of its own for it."""

    def fail():
        if dist.get_rank() == 1:
            dist.barrier()
            os._exit(1)
        dist.barrier()
        try:
            dist.recv(torch.ones(1), 1)
        except RuntimeError:
            raise ValueError("rank 1 has not sent") from None

    assert text_of(fail)[0] == "Rank 1 of 3 exited with code 1"
    assert text_of(fail)[-2:] == THE_OTHERS


def limit_memory():
    """No more memory than this process has now and 200 MB."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 200_000_000, now + 200_000_000))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("allocate", [lambda: bytearray(1 << 30), lambda: torch.ones(1 << 28)])
def test_out_of_memory(allocate):
    def fill():
        if dist.get_rank() == 1:
            limit_memory()
            allocate()
        dist.barrier()

    text = text_of(fill)
    assert text[0].startswith(("Rank 1 of 3 raised MemoryError", "Rank 1 of 3 raised RuntimeError: "))
    assert text[-4:] == ["", "Memory ran out. Try smaller tensors or fewer ranks.", *THE_OTHERS]


def cycle():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise error from error


def odd_notes():
    error = ValueError("bad")
    error.__notes__ = [1]
    raise error


class Vicious(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    def __bool__(self):
        raise SystemExit


def vicious():
    raise ValueError("outer") from Vicious()


def group():
    try:
        raise ValueError("the real one")
    except ValueError as error:
        raise ExceptionGroup("two", [error, KeyError("x")]) from None


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        (cycle, ["All 3 ranks raised ZeroDivisionError: division by zero"]),
        (odd_notes, ["All 3 ranks raised ValueError: bad", "1"]),
        (vicious, ["All 3 ranks raised ValueError: outer", "raised from Vicious: (its message cannot be made: KeyboardInterrupt)"]),
        (
            group,
            ["All 3 ranks raised ExceptionGroup: two (2 sub-exceptions)", "with ValueError: the real one", "with KeyError: 'x'"],
        ),
    ],
)
def test_exceptions_that_are_hard_to_tell(fail, told):
    text = text_of(fail, timeout=5)
    assert text[: len(told)] == told
    if fail is group:
        assert '      raise ValueError("the real one")' in text


def test_a_rank_that_cannot_even_report_is_not_blamed_on_the_learner(tmp_path):
    def fail():
        json.dumps = None
        raise ValueError

    assert text_of(fail)[0] == "All 3 ranks could not write down what happened"
    probe = ["unshare", "-rm", "true"]
    if sys.platform != "linux" or subprocess.run(probe, capture_output=True).returncode != 0:
        return
    program = "import torch; from allhands import run; run(torch.zeros, 2_000_000, world_size=1)"
    shell = f'mount -t tmpfs -o size=3m tmpfs {tmp_path} && TMPDIR={tmp_path} exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", shell, sys.executable, program], capture_output=True, text=True)
    assert "The only rank raised OSError: [Errno 28] No space left on device" in done.stderr


def test_a_module_that_cannot_be_imported_is_told_the_same_way_every_time(tmp_path, monkeypatch):
    """It fails before all ranks have started, and in all of them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper_of_a_learner.py").write_text("def f(): return 1\n")
    import helper_of_a_learner

    (tmp_path / "helper_of_a_learner.py").write_text("def f() return 1\n")
    for _ in range(10):
        text = text_of(helper_of_a_learner.f)
        assert text == ["All 3 ranks raised SyntaxError: expected ':' (helper_of_a_learner.py, line 1)"]


class Stubborn(Exception):
    def __init__(self):
        super().__init__("I cannot be pickled")
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (lambda: Stubborn(), "Stubborn: I cannot be pickled"),
        (lambda: Mute(), "Mute: (its message cannot be made: ValueError)"),
        (lambda: ValueError(), "ValueError"),
        (lambda: KeyboardInterrupt(), "KeyboardInterrupt"),
        (lambda: ValueError("é \ud800 \x00"), "ValueError: é \ud800 \x00"),
        (lambda: ValueError("a" * 10_000_000 + "end"), f"ValueError: {'a' * 500} … 9,999,003 characters not shown … {'a' * 497}end"),
    ],
)
def test_exceptions_of_every_kind(error, told):
    def fail():
        raise error()

    assert text_of(fail)[0] == f"All 3 ranks raised {told}"


def test_input():
    assert text_of(lambda: input("name? "))[0] == (
        "All 3 ranks raised RuntimeError: a rank has no keyboard: input() and breakpoint() cannot work. "
        "Set a variable before, or give run() an argument"
    )
    assert "a rank has no keyboard" in text_of(lambda: breakpoint())[0]


def test_a_name_of_another_cell():
    text = text_of(lambda: made_elsewhere)  # noqa: F821
    assert text[0] == "All 3 ranks raised NameError: name 'made_elsewhere' is not defined"
    assert text[-1] == "If another %%ranks cell made it: ranks are new in every run, and what they made is gone with them."


def test_a_name_that_was_mistyped_or_that_only_cells_have():
    value = 1
    assert text_of(lambda: valeu + value)[-1] == "Did you mean value?"  # noqa: F821
    assert text_of(lambda: pritn())[-1] == "Did you mean print?"  # noqa: F821
    assert text_of(lambda: rank)[-1] == "Only %%ranks cells have rank. In a function: dist.get_rank()."  # noqa: F821
    assert text_of(lambda: world_size)[-1].endswith("In a function: dist.get_world_size().")  # noqa: F821


def test_a_message_to_oneself():
    text = text_of(lambda: dist.recv(torch.ones(1), src=dist.get_rank()))
    assert text[0].startswith("All 3 ranks raised RuntimeError: state_ >= CONNECTED") and "pair.cc" not in text[0]
    assert text[-1] == "A rank cannot send to itself, or receive from itself."


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda rank: dist.send(torch.ones(1), rank + 1),
            "there is no rank 3: ranks go from 0 to 2. In a ring, the rank after the last is 0: ",
        ),
        (
            lambda rank: dist.recv(torch.ones(1), rank - 1),
            "there is no rank -1: ranks go from 0 to 2. In a ring, the rank before 0 is the last: ",
        ),
        (lambda rank: dist.isend(torch.ones(1), 7).wait(), "there is no rank 7: ranks go from 0 to 2"),
    ],
)
def test_a_rank_that_does_not_exist(call, told):
    def talk():
        call(dist.get_rank())

    assert told in text_of(talk)[0]


def test_a_second_process_group():
    assert text_of(lambda: dist.init_process_group("gloo"))[-1] == (
        "Ranks are born with their process group: leave init_process_group out."
    )


def test_sizes_that_make_gloo_abort():
    def unequal():
        if dist.get_rank() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(2), 0)

    text = text_of(unequal, world_size=2, record=False)  # The recorder would say better: test_mismatches.py.
    assert text[0] == "Rank 1 of 2 died of an abort in a C++ library (SIGABRT)"
    assert text[3] == "      dist.recv(torch.ones(2), 0)"
    assert text[5].endswith("Did two ranks disagree about the size of a message?")


def test_a_failure_does_not_wait_for_others_who_sleep():
    def fail():
        if dist.get_rank() == 0:
            raise ValueError
        time.sleep(60)

    start = time.monotonic()
    text_of(fail)
    assert time.monotonic() - start < 10


def test_what_was_printed_before_the_failure_is_shown_and_kept(capsys):
    def fail():
        print("hello")
        raise ValueError

    with pytest.raises(RankError) as caught:
        run(fail, world_size=2)
    assert capsys.readouterr().out == "[0-1] hello\n"
    assert caught.value.output == ("hello\n", "hello\n")


def test_a_rank_that_prints_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr("allhands.watch.MAX_OUTPUT_BYTES", 100_000)
    monkeypatch.setattr("allhands.output.MAX_OUTPUT_BYTES", 100_000)

    def chatter():
        while dist.get_rank() == 1:
            print("again")

    text = text_of(chatter)
    assert text == ["Rank 1 of 3 printed more than 100,000 bytes", "", "Is there a print in an endless loop?", *THE_OTHERS]


# --- time-outs ----------------------------------------------------------------------------------------------------


def test_a_time_out_says_where_each_rank_stands():
    def stand():
        rank = dist.get_rank()
        if rank == 0:
            return
        if rank == 1:
            time.sleep(60)
        if rank == 2:
            sum(itertools.count())  # never gives Python a chance
        dist.recv(torch.ones(1), src=1)

    text = text_of(stand, world_size=5, timeout=1, error=RankTimeout)
    assert text == [
        "Not finished after 1 second.",
        "",
        "Rank 0 of 5:",
        "  had finished",
        "Rank 1 of 5:",
        HERE,
        "      time.sleep(60)",
        "Rank 2 of 5:",
        HERE,
        "      sum(itertools.count())  # never gives Python a chance",
        "Ranks 3-4 of 5:",
        HERE,
        "      dist.recv(torch.ones(1), src=1)",
        "",
        "Do they wait for one that had finished? A send needs a recv, and a collective every rank of its group.",
        "If they were only slow, give them longer: timeout=60, or %%ranks 4 --timeout 60.",
    ]


def test_a_time_out_where_no_line_is_the_learners():
    def leave_a_thread():
        threading.Thread(target=time.sleep, args=(60,)).start()

    assert text_of(time.sleep, 60, timeout=0.5, error=RankTimeout)[2:4] == ["All 3 ranks:", "  was in a library"]
    assert text_of(leave_a_thread, timeout=0.5, error=RankTimeout)[3] == "  was waiting for threads that it had started"


def test_a_time_out_of_a_stopped_rank():
    def stop():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    text = text_of(stop, timeout=0.5, error=RankTimeout)
    assert text[0] == "Not finished after 0.5 seconds."
    assert text[2:4] == ["Rank 0 of 3:", "  did not say where it is"]


def test_a_time_out_is_also_a_timeouterror():
    with pytest.raises(TimeoutError):
        run(time.sleep, 60, world_size=2, timeout=0.2)


def test_no_time_out():
    assert run(dist.get_rank, world_size=2, timeout=float("inf")).results == [0, 1]


def test_a_deep_stack_at_a_time_out():
    def dive(depth):
        return dive(depth - 1) if depth else time.sleep(60)

    text = text_of(dive, 300, timeout=0.5, error=RankTimeout)
    assert text[2] == "All 3 ranks:" and text[-4] == "      return dive(depth - 1) if depth else time.sleep(60)"


# --- when not even the ranks can be had ---------------------------------------------------------------------------


def test_a_system_that_gives_no_more_processes():
    """The fork server's third fork fails. Its run is over, and the next one works."""
    scarce = """
        import os
        fork, calls = os.fork, []
        def scarce():
            calls.append(1)
            if len(calls) == 3:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()
        os.fork = scarce
    """
    program = f"""
        from allhands import forkserver, run
        forkserver._SERVER_CODE = {textwrap.dedent(scarce)!r} + forkserver._SERVER_CODE
        try:
            run(int, world_size=4)
        except Exception as error:
            print(error)
        print(run(int, world_size=4).results)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "Rank 2 of 4 could not be started (Resource temporarily unavailable)",
        "",
        "Try fewer ranks: the system gives no more processes or memory.",
        "",
        "The other 3 ranks were stopped.",
        "[0, 0, 0, 0]",
    ], done.stderr


def test_where_the_system_tells_less():
    """As on macOS: no word of what threads do, no look at a child that has ended. (Not macOS itself.)"""
    program = """
        import ctypes, os
        import torch.distributed as dist
        from allhands import forkserver, liveness, run

        forkserver._SERVER_CODE = "import os; del os.waitid; " + forkserver._SERVER_CODE
        liveness.can_tell = False

        def fail():
            if dist.get_rank() == 1:
                raise ValueError("bad luck")
            dist.barrier()

        def all_fail():
            raise ValueError("bad luck")

        def crash():
            if dist.get_rank() == 1:
                ctypes.string_at(0)
            dist.barrier()

        for fn in (fail, all_fail, crash):
            try:
                run(fn, world_size=3)
            except Exception as error:
                print(str(error).splitlines()[0], "|", str(error).splitlines()[-1])
        print(run(dist.get_rank, world_size=3).results)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "Rank 1 of 3 raised ValueError: bad luck | The other 2 ranks were stopped.",
        "All 3 ranks raised ValueError: bad luck |   <string>, line 15, in all_fail",
        "Rank 1 of 3 died of a segmentation fault (SIGSEGV) | The other 2 ranks were stopped.",
        "[0, 1, 2]",
    ], done.stderr


def test_a_rank_that_left_its_process_group_is_ended_too():
    def move():
        os.setpgid(0, os.getpgid(os.getppid()))
        return os.getpid()

    pids = run(move, world_size=2).results
    assert wait_until(lambda: not any(map(is_alive, pids)))
