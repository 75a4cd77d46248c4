"""What ranks print: nothing is lost, nothing hangs, and the reader sees it in order."""

import ctypes
import io
import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from allhands import run
from allhands.printed import SHOWN_LINE, SHOWN_LINES, LiveText, as_on_screen, cut_block, cut_line, fold, group_equal, rank_label

# --- the rules, without ranks -------------------------------------------------------------------------------------


def ranks_of(label):
    """`rank_label`, backwards."""
    parts = [part.split("-") for part in label.split(",")]
    return {rank for part in parts for rank in range(int(part[0]), int(part[-1]) + 1)}


@given(st.sets(st.integers(0, 40), min_size=1))
def test_a_label_names_exactly_its_ranks(ranks):
    assert ranks_of(rank_label(ranks)) == ranks


def test_labels():
    assert [rank_label(ranks) for ranks in ([0], [0, 1], [3, 1], [0, 2, 3, 4], range(64))] == ["0", "0-1", "1,3", "0,2-4", "0-63"]


@given(st.lists(st.sampled_from("abc")))
def test_groups_hold_every_rank_once_and_come_in_the_order_of_their_lowest(values):
    groups = group_equal(values)
    assert sorted(rank for ranks, _ in groups for rank in ranks) == list(range(len(values)))
    assert all(values[rank] == value for ranks, value in groups for rank in ranks)
    assert [ranks[0] for ranks, _ in groups] == sorted(ranks[0] for ranks, _ in groups)
    assert len({value for _, value in groups}) == len(groups)


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["hello\n"] * 4, "[0-3] hello\n"),
        (["a\n", "b\n", "a\n"], "[0,2] a\n[1]   b\n"),
        (["", "only me", ""], "[1] only me\n"),
        (["", ""], ""),
        (["a\n\nb\n"], "[0] a\n[0]\n[0] b\n"),
        (["\n"], "[0]\n"),
        (["10%\r50%\r100%\ndone\r\n"], "[0] 100%\n[0] done\n"),
    ],
)
def test_fold(texts, shown):
    assert fold(texts) == shown


def test_what_a_carriage_return_overwrote_is_not_shown():
    assert [as_on_screen(line) for line in ("ab", "ab\rc", "ab\r", "a\rb\r\r")] == ["ab", "c", "ab", "b"]


@given(st.lists(st.text(alphabet="ab", max_size=300), min_size=1, max_size=400))
def test_a_cut_block_keeps_its_ends_and_counts_what_it_left_out(lines):
    shown = cut_block(lines)
    if shown == lines:
        return
    (note,) = [line for line in shown if line.startswith("… ")]
    at = shown.index(note)
    dropped = int(note.split()[1].replace(",", ""))
    assert shown[:at] == lines[:at] and shown[at + 1 :] == lines[at + dropped :]
    assert at + dropped + len(shown) - at - 1 == len(lines)
    assert len(shown) <= SHOWN_LINES + 1 and at >= 1


@given(st.integers(1, 3 * SHOWN_LINE))
def test_a_cut_line_says_how_much_it_left_out(length):
    line = cut_line("x" * length)
    if length <= SHOWN_LINE:
        assert line == "x" * length
    else:
        assert int(line.split()[2].replace(",", "")) + line.count("x") == length + "characters".count("x")


@given(st.lists(st.text(alphabet="ab\n", max_size=5)))
def test_live_text_is_whole_lines_however_it_arrives(pieces):
    live = LiveText(7)
    shown = [line for piece in pieces for line in live.take(piece)] + list(live.take("", last=True))
    text = "".join(pieces)
    assert "".join(shown) == "".join(
        f"[7] {line}".rstrip() + "\n" for line in text.split("\n")[: None if text[-1:] not in ("", "\n") else -1]
    )


def test_live_text_has_a_limit_and_says_so():
    live = LiveText(0)
    shown = list(live.take("x\n" * 1000)) + list(live.take("y\n" * 9, last=True))
    assert len(shown) == SHOWN_LINES + 1
    assert shown[-1] == f"[0] … {1009 - SHOWN_LINES:,} more lines not shown …\n"


# --- the real thing -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _clean(clean):
    pass


def test_text_comes_in_rank_order_and_equal_text_once(capsys):
    def talk():
        rank = dist.get_rank()
        time.sleep(0.05 * (3 - rank))
        print("even" if rank % 2 == 0 else f"odd {rank}")

    job = run(talk)
    assert capsys.readouterr().out == "[0,2] even\n[1]   odd 1\n[3]   odd 3\n"
    assert job.output == ["even\n", "odd 1\n", "even\n", "odd 3\n"]


def test_python_c_and_subprocesses_on_both_streams_in_their_order():
    def talk():
        libc = ctypes.CDLL(None)
        print("python out")
        print("python err", file=sys.stderr)
        libc.printf(b"c out\n")
        os.write(2, b"descriptor\n")
        subprocess.run(["echo", "subprocess"], check=True)
        libc.printf(b"c, half a line")

    expected = "python out\npython err\nc out\ndescriptor\nsubprocess\nc, half a line"
    assert run(talk, world_size=2).output == [expected] * 2


def test_half_lines_and_c_text_survive_sudden_death():
    def die():
        print("half a line", end="")
        ctypes.CDLL(None).puts(b" and a line of C")
        dist.barrier()
        os._exit(1)

    with pytest.raises(Exception) as caught:
        run(die, world_size=2)
    assert caught.value.output == ("half a line and a line of C\n",) * 2


def test_megabytes_are_kept_whole_and_shown_cut(capsys):
    def flood():
        for i in range(200_000):
            print("line", i, "of rank", dist.get_rank())

    job = run(flood, world_size=3)
    for rank in range(3):
        assert job.output[rank] == "".join(f"line {i} of rank {rank}\n" for i in range(200_000))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "[0] line 0 of rank 0" and shown[-1] == "[2] line 199999 of rank 2"
    assert f"[1] … {200_000 - SHOWN_LINES:,} lines not shown …" in shown
    assert len(shown) == 3 * (SHOWN_LINES + 1)


def test_one_endless_line(capsys):
    assert run(lambda: print("x" * 5_000_000, end=""), world_size=1).output == ["x" * 5_000_000]
    assert capsys.readouterr().out == f"[0] {'x' * 1000} … {5_000_000 - SHOWN_LINE:,} characters not shown … {'x' * 1000}\n"


def test_bytes_that_are_not_utf8(capsys):
    assert run(lambda: sys.stdout.buffer.write(b"\xff\xfe ok\n") and None, world_size=1).output == ["\\xff\\xfe ok\n"]
    assert run(lambda: print("é 北 \ud800"), world_size=1).output == ["é 北 \\ud800\n"]
    assert capsys.readouterr().out == "[0] \\xff\\xfe ok\n[0] é 北 \\ud800\n"


def test_a_learner_may_replace_the_streams():
    def replace():
        sys.stdout = io.StringIO()
        print("swallowed")
        sys.stderr = None

    assert run(replace, world_size=2).output == ["", ""]


def test_threads_of_a_rank_print_too():
    def talk():
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()

    assert run(talk, world_size=1).output == ["from a thread\n"]


class Clock(io.StringIO):
    """Remembers what was written when."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def write(self, text):
        self.seen += [(time.monotonic(), line) for line in text.splitlines(keepends=True)]
        return super().write(text)


def test_stream_shows_whole_lines_as_they_come(monkeypatch):
    def talk():
        for i in range(3):
            print("step", i, end="")
            print("!")
            dist.barrier()
            time.sleep(0.3)
        print("the end", end="")

    clock = Clock()
    monkeypatch.setattr(sys, "stdout", clock)
    job = run(talk, world_size=2, stream=True)
    lines = [line for _, line in clock.seen]
    assert sorted(lines) == sorted(f"[{r}] {text}\n" for r in range(2) for text in ("step 0!", "step 1!", "step 2!", "the end"))
    times = {line: at for at, line in clock.seen}
    assert times["[0] step 0!\n"] + 0.2 < times["[0] step 1!\n"] and times["[1] step 1!\n"] + 0.2 < times["[1] step 2!\n"]
    assert job.output == ["step 0!\nstep 1!\nstep 2!\nthe end"] * 2


def test_stream_does_not_break_characters(monkeypatch):
    def talk():
        for byte in "é北".encode():
            os.write(1, bytes([byte]))
            time.sleep(0.1)

    clock = Clock()
    monkeypatch.setattr(sys, "stdout", clock)
    run(talk, world_size=1, stream=True)
    assert clock.getvalue() == "[0] é北\n"
