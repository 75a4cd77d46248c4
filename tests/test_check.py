"""`check` and `hint`: whatever a learner's code does, it is told in clear words, soon, and nothing is left behind."""

import functools
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from allhands import RankError, check, hint, run
from allhands.causality import heard_from
from allhands.checking import CheckFailed
from allhands.parallel import messages
from allhands.trial import attempt
from allhands.values import difference, in_words, same
from kernels import kernel

pytestmark = pytest.mark.usefixtures("fork_server")

SHIFT, DELIVER = "ranks_and_messages.shift", "ranks_and_messages.deliver"


def failure(task_id, answer):
    with pytest.raises(CheckFailed) as caught:
        check(task_id, answer)
    assert str(caught.value).endswith(f'hint("{task_id}") helps on.')
    return caught.value


def right(x):
    """Only to be handed over."""


def neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % world_size, (rank - 1) % world_size


# --- what a learner's code may do ---------------------------------------------------------------------------------


def test_wrong_values_are_shown_by_rank_with_the_first_difference_and_a_picture():
    def own(x):
        return x

    error = failure(DELIVER, own)
    assert str(error) == (
        "deliver is not right yet with 3 ranks.\n\n"
        "All 3 ranks returned something else than expected.\n\n"
        "rank  x                     expected              got\n"
        "0     float32 [10.0, 13.0]  None                  float32 [10.0, 13.0]\n"
        "1     float32 [20.0, 23.0]  None                  float32 [20.0, 23.0]\n"
        "2     float32 [30.0, 33.0]  float32 [10.0, 13.0]  float32 [30.0, 33.0]\n\n"
        "The first difference: in rank 0, it should be None and is float32 [10.0, 13.0].\n\n"
        'hint("ranks_and_messages.deliver") helps on.'
    )
    assert error.picture is None  # Nothing was sent.


def test_it_says_where_it_is_right_already():
    def without_the_world_of_one(x):
        right, left = neighbours()
        received = torch.empty_like(x)
        works = [dist.isend(x, right), dist.irecv(received, left)]
        for work in works:
            work.wait()
        return received

    error = failure(SHIFT, without_the_world_of_one)
    assert str(error).startswith("shift is not right yet with 1 rank. (It is right with 2-5,8 ranks.)")


def test_a_hang_is_explained_and_drawn():
    def receive_first(x):
        right, left = neighbours()
        received = torch.empty_like(x)
        dist.recv(received, left)
        dist.send(x, right)
        return received

    begin = time.monotonic()
    error = failure(SHIFT, receive_first)
    assert time.monotonic() - begin < 15  # 1 on such a machine
    assert "Deadlock: all 3 ranks wait for what can never come." in str(error)
    assert "dist.recv(received, left)" in str(error)
    assert "All receive first, so nobody ever comes to send." in str(error)
    assert repr(error.picture) == "[picture: 3 ranks: 0 messages in 0 rounds; deadlock]"


def test_an_endless_loop_is_stopped():
    def endless(x):
        while True:
            pass

    begin = time.monotonic()
    error = failure(SHIFT, endless)
    assert time.monotonic() - begin < 15  # 5 on a machine that has nothing else to do
    assert "Not finished after 3 seconds.\n\n" in str(error) and ", in endless\n" in str(error)
    assert "Is there a loop without an end, or a sleep?" in str(error) and "timeout=60" not in str(error)


def test_an_answer_that_is_right_but_slow_is_stopped():
    def slow(x):
        time.sleep(0.8)
        return in_a_ring(x) if dist.get_world_size() > 1 else x

    text = str(failure(SHIFT, slow))  # In the sum of its calls, or, where starting is slow too, in one of them.
    assert (
        "What comes out is right so far, but the calls have taken more than 3 seconds." in text or "Not finished after 3 seconds." in text
    )
    assert "Right answers take some hundredths of a second." in text


def test_on_a_busy_machine_a_time_out_is_not_the_answers_fault(monkeypatch):
    from allhands import checking, trial

    monkeypatch.setattr(trial, "_BUSY_SECONDS", 0)
    monkeypatch.setattr(checking, "LIMIT_SECONDS", 0.1)

    def slow(x):
        time.sleep(1.1 if dist.get_world_size() == 3 else 0)
        return in_a_ring(x) if dist.get_world_size() > 1 else x

    assert "right, in 6 cases" in repr(check(SHIFT, slow))


def test_it_is_not_started_only_if_it_says_so():
    def half(x):
        if dist.get_world_size() == 2:
            raise NotImplementedError
        return in_a_ring(x)

    def torchs_own(x):
        return torch.empty(2, device="meta").tolist()

    assert "Both ranks raised NotImplementedError" in str(failure(SHIFT, half))
    assert "is not started" not in str(failure(SHIFT, torchs_own))


def test_a_crash_shows_the_learners_line():
    def crash(x):
        return x[10]

    error = failure(SHIFT, crash)
    assert "All 3 ranks raised IndexError: index 10 is out of bounds" in str(error)
    assert "return x[10]" in str(error)
    assert "allhands/trial" not in str(error)


def test_a_rank_that_dies():
    def die(x):
        os._exit(3)

    assert "exited with code 3" in str(failure(SHIFT, die))


def test_what_it_prints_is_shown_of_the_case_that_is_told(capfd):
    def chatty(x):
        print("my x is", x)
        return x

    failure(SHIFT, chatty)
    assert capfd.readouterr().out == (
        "What it printed with 3 ranks:\n[0] my x is tensor([0., 1.])\n[1] my x is tensor([10., 11.])\n[2] my x is tensor([20., 21.])\n"
    )


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: dist.broadcast(x.clone(), 0), "broadcast(from rank 0)"),
        (lambda x: dist.all_reduce(x.clone()), "all_reduce(SUM)"),
        (lambda x: dist.barrier(), "barrier"),
    ],
)
def test_what_does_the_work_is_not_accepted(call, name):
    def with_a_collective(x):
        call(x)
        right, left = neighbours()
        if right == left == dist.get_rank():
            return x
        received = torch.empty_like(x)
        works = [dist.isend(x, right), dist.irecv(received, left)]
        for work in works:
            work.wait()
        return received

    error = failure(SHIFT, with_a_collective)
    assert f"Rank 0 of 3 calls {name}:" in str(error)
    assert "Build it from these: send, recv" in str(error)


def test_the_courses_own_solution_is_not_accepted():
    def borrowed(x):
        return messages.shift(x)

    for answer in (borrowed, functools.wraps(messages.shift)(lambda x: messages.shift(x)), functools.partial(messages.shift)):
        assert "It calls the course's own shift. Write it yourself: that is the task." in str(failure(SHIFT, answer))


def test_a_changed_argument_is_told():
    def in_place(x):
        right, left = neighbours()
        if right == dist.get_rank():
            return x
        received = torch.empty_like(x)
        works = [dist.isend(x, right), dist.irecv(received, left)]
        for work in works:
            work.wait()
        x += 1
        return received

    text = str(failure(SHIFT, in_place))
    assert "Rank 0 of 3 has changed its argument x, which belongs to the caller: it was float32 [0.0, 1.0] before the call." in text


def test_a_message_that_is_not_waited_for_is_told():
    def lazy(x):
        right, left = neighbours()
        received = torch.empty_like(x)
        if right != dist.get_rank():
            sending = dist.isend(x, right)
            dist.irecv(received, left)
            sending.wait()
        return received

    assert "It was not waited for: its tensor may not hold yet what was sent." in str(failure(SHIFT, lazy))


def test_too_many_messages_are_told():
    def to_all(x):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            for peer in range(1, world_size):
                dist.send(x, peer)
            return x if world_size == 1 else None
        received = torch.empty_like(x)
        dist.recv(received, 0)
        return received if rank == world_size - 1 else None

    text = str(failure(DELIVER, to_all))
    assert "What comes out is right, but not what is sent." in text
    assert "rank  messages out: expected  got\n0     1                       2" in text
    assert "It takes one message: rank 0 may send to any rank, however far away it is." in text


def test_a_prediction_is_not_told_what_is_right():
    text = str(failure("ranks_and_messages.predict", lambda: (3.0, 3, 1)))
    assert "Of your 3 answers, the second (3) and the third (1) are not what happens." in text
    assert "\nThe second: The ledger counts bytes, not elements, and a float32 has four.\nThe third: They do not all send at once" in text
    assert "12" not in text and "known mistake" not in text
    assert "The answer is 3 values in a tuple" in str(failure("ranks_and_messages.predict", lambda: 3.0))
    assert "this is None. Is there a return?" in str(failure("ranks_and_messages.predict", lambda: None))
    assert "ZeroDivisionError" in str(failure("ranks_and_messages.predict", lambda: (1 / 0, 12, 3)))
    assert "'list' object" not in str(failure("ranks_and_messages.predict", lambda: (6.0, [], None)))


# --- what check is given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task_id", "answer", "error", "text"),
    [
        (
            "ranks_and_messages.shfit",
            right,
            ValueError,
            "there is no task 'ranks_and_messages.shfit'. Is it one of these? ranks_and_messages.shift",
        ),
        ("shift", right, ValueError, "there is no task 'shift'"),
        (None, right, ValueError, "there is no task None"),
        (right, SHIFT, ValueError, "there is no task"),
        (
            SHIFT,
            torch.ones(2),
            TypeError,
            "check needs your function itself, but got Tensor tensor([1., 1.]). Write shift, without brackets",
        ),
        (SHIFT, lambda: 1, TypeError, "check will call shift(x), but your function cannot be called so: too many positional arguments"),
        (SHIFT, lambda x, y: 1, TypeError, "missing a required argument: 'y'"),
    ],
)
def test_bad_arguments_get_a_clear_error(task_id, answer, error, text):
    with pytest.raises(error) as caught:
        check(task_id, answer)
    assert text in str(caught.value)
    assert caught.value._render_traceback_()[0].startswith(f"{error.__name__}: ")


def test_hints_come_one_after_another_and_begin_again():
    texts = [repr(hint("ranks_and_messages.largest")) for _ in range(4)]
    assert texts[0].startswith("Hint 1 of 3: Think of people in a line")
    assert texts[0].endswith('Again hint("ranks_and_messages.largest") for the next.')
    assert texts[2].startswith("Hint 3 of 3") and texts[2].endswith("That was the last.")
    assert texts[3] == texts[0]
    with pytest.raises(ValueError, match="there is no task 'largest'"):
        hint("largest")


# --- in a notebook ------------------------------------------------------------------------------------------------


def test_in_a_notebook_the_picture_comes_first_and_no_traceback():
    with kernel() as notebook:
        notebook.cell("from allhands import check")
        reply = notebook.cell(
            "def shift(x):\n    r, n = dist.get_rank(), dist.get_world_size()\n    y = torch.empty_like(x)\n"
            '    dist.recv(y, (r - 1) % n)\n    dist.send(x, (r + 1) % n)\n    return y\ncheck("ranks_and_messages.shift", shift)'
        )
        assert reply.shown == "[picture: 3 ranks: 0 messages in 0 rounds; deadlock]"
        assert reply.error_name == "CheckFailed"
        assert reply.error.startswith("CheckFailed: shift is not right yet with 3 ranks.") and "Traceback" not in reply.error
        assert "This cell, line 4, in shift\n      dist.recv(y, (r - 1) % n)" in reply.error


# --- the parts ----------------------------------------------------------------------------------------------------


def test_same_is_exact():
    assert same(torch.ones(2), torch.ones(2)) and same((1, None), [1, None]) and same(3.0, 3)
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not same(torch.ones(2), torch.ones(1, 2))
    assert not same(torch.ones(1), torch.ones(1) + 1e-7)
    assert not same(torch.ones(1), 1.0) and not same(None, torch.ones(1))
    assert not same(None, torch.ones(2).numpy()) and not same((1,), (1, 2))


class Hostile:
    """Neither compares nor tells."""

    def __eq__(self, other):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")


ODD = {
    "hostile": Hostile(),
    "meta": torch.ones(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "long": 10**5000,
    "any": mock.ANY,
    "array": torch.ones(2).numpy(),
    "list": [torch.ones(2)],
    "nan": float("nan"),
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_odd_values_are_wrong_and_told(value):
    text = str(failure(SHIFT, lambda x: value))
    assert "All 3 ranks returned something else than expected." in text and "The first difference: in rank 0, " in text
    assert "are not what happens" in str(failure("ranks_and_messages.predict", lambda: (value, value, 3)))


def test_a_hang_in_a_late_case_is_told_soon():
    def late(x):
        while dist.get_world_size() == 5:
            time.sleep(0.01)
        return in_a_ring(x)

    begin = time.monotonic()
    text = str(failure(SHIFT, late))
    assert time.monotonic() - begin < 15  # 5 on a machine that has nothing else to do
    assert text.startswith("shift is not right yet with 5 ranks. (It is right with 2-4 ranks.)\n\nNot finished after 3 seconds.")


def in_a_ring(x):
    right, left = neighbours()
    received = torch.empty_like(x)
    sending = dist.isend(x, right)
    dist.recv(received, left)
    sending.wait()
    return received


def test_values_in_words():
    assert in_words(torch.ones(2, 1)) == "float32 [[1.0], [1.0]]"
    assert in_words(torch.empty(0, 3)) == "float32 [0, 3], empty"
    assert in_words(torch.tensor(True)) == "bool True"
    assert len(in_words(torch.zeros(1000))) <= 46 and in_words(torch.zeros(100)).startswith("float32 [0.0, 0.0")
    assert in_words(object()) == "<object object>"
    assert difference(torch.zeros(2), torch.zeros(2, dtype=torch.int64)) == "the dtype should be torch.float32 and is torch.int64"
    assert difference(torch.zeros(2), torch.zeros(2, 1)) == "the shape should be [2] and is [2, 1]"
    assert difference(torch.zeros(2, 2), torch.eye(2)) == "element [0, 0] should be 0 and is 1"
    assert difference(torch.tensor(1.0), torch.tensor(2.0)) == "the number should be 1 and is 2"


def knowledge(fn, world_size):
    return heard_from(run(fn, world_size=world_size).trace)


def test_who_has_heard_from_whom():
    def line():
        rank, x = dist.get_rank(), torch.zeros(1)
        if rank > 0:
            dist.recv(x, rank - 1)
        if rank < dist.get_world_size() - 1:
            dist.send(x, rank + 1)

    assert knowledge(line, 4) == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]


def test_what_is_received_too_late_is_not_passed_on():
    def crossing():
        """Rank 1 sends to 2 before it has heard from 0."""
        rank, x = dist.get_rank(), torch.zeros(1)
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.send(x, 2)
            dist.recv(x, 0)
        else:
            dist.recv(x, 1)

    assert knowledge(crossing, 3) == [{0}, {0, 1}, {1, 2}]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_barriers_let_everybody_hear_from_everybody(world_size):
    for barrier in (messages.ring_barrier, messages.root_barrier):
        assert knowledge(barrier, world_size) == [set(range(world_size))] * world_size


def test_a_trial_keeps_what_is_printed_to_itself(capfd):
    from allhands import exercises

    def chatty(x):
        print("hello")
        return x

    task = exercises.find(SHIFT)
    trial = attempt(task, task.cases[0], chatty)
    assert trial.printed == "[0-2] hello\n" and capfd.readouterr().out == ""
    assert not isinstance(trial.ended, RankError)
