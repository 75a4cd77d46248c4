"""Two ends that do not fit: told with both ends and both lines, whether gloo notices, ignores it or dies of it. And leftovers."""

import pytest
import torch
import torch.distributed as dist

from allhands import RankDeadlock, RankError, run

pytestmark = pytest.mark.usefixtures("clean")


GLOO, SAME = "gloo, which carries the messages,", "Make both tensors the same size."


def error_of(fn, world_size=2):
    with pytest.raises(RankError) as caught:
        run(fn, world_size=world_size)
    assert not isinstance(caught.value, RankDeadlock)
    return str(caught.value)


def message(sent, received, tag=0):
    """A program whose rank 0 sends and whose rank 1 receives."""

    def program():
        if dist.get_rank() == 0:
            dist.send(sent, 1, tag=tag)
        else:
            dist.recv(received, 0, tag=tag)

    return program


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ends(sent, received):
    """How both ends are told."""
    place = "  tests/test_mismatches.py, line {}, in program\n      {}\n"
    line = message.__code__.co_firstlineno + 5
    first, second = place.format(line, "dist.send(sent, 1, tag=tag)"), place.format(line + 2, "dist.recv(received, 0, tag=tag)")
    return f"Rank 0 of 2 sends {sent} to rank 1:\n{first}\nRank 1 of 2 receives {received} from rank 0:\n{second}"


@pytest.mark.parametrize(
    ("sent", "received", "what", "told", "effect"),
    [
        (
            zeros(2),
            zeros(4),
            "size",
            ("float32[2] (8 bytes)", "float32[4] (16 bytes)"),
            f"{GLOO} does not notice: behind the first 8 bytes the tensor keeps what it held before. {SAME}",
        ),
        (
            zeros(4),
            zeros(2),
            "size",
            ("float32[4] (16 bytes)", "float32[2] (8 bytes)"),
            f"{GLOO} ends the process of a rank that gets more than it has room for. {SAME}",
        ),
        (
            zeros(4),
            zeros(4, dtype=torch.int32),
            "dtype",
            ("float32[4] (16 bytes)", "int32[4] (16 bytes)"),
            f"{GLOO} does not convert: the bytes of float32 numbers are read as int32. Give both ends one dtype.",
        ),
        (
            zeros(2, 3),
            zeros(3, 2),
            "shape",
            ("float32[2, 3] (24 bytes)", "float32[3, 2] (24 bytes)"),
            "The numbers arrive in the order of memory, whatever the shape: reshape one of the two.",
        ),
        (
            zeros(0),
            zeros(1),
            "size",
            ("float32[0] (0 bytes)", "float32[1] (4 bytes)"),
            f"{GLOO} does not notice: behind the first 0 bytes the tensor keeps what it held before. {SAME}",
        ),
    ],
)
def test_the_two_ends_of_a_message(sent, received, what, told, effect):
    assert error_of(message(sent, received)) == f"The two ends of a message differ in {what}.\n\n{ends(*told)}\n{effect}"


def test_the_text_is_the_same_when_gloo_dies_of_it(capfd):
    """Who of the ranks dies, and what gloo says then, differs from run to run."""

    def unequal():
        dist.all_reduce(torch.zeros(4 + 2 * dist.get_rank()))

    texts = {error_of(unequal, world_size=3) for _ in range(4)}
    (text,) = texts
    assert text.startswith(
        "Ranks disagree about the size of collective number 1.\n\nRank 0 of 3 calls all_reduce(SUM) with float32[4] (16 bytes):\n"
    )
    assert "\n\nRank 2 of 3 calls all_reduce(SUM) with float32[8] (32 bytes):\n" in text
    assert text.endswith("All ranks of a group have to call it with the same size.")
    assert "terminate called" not in capfd.readouterr().out


def both(first, others):
    """A program in which rank 0 calls one thing, and the others another."""

    def program():
        (first if dist.get_rank() == 0 else others)()

    return program


@pytest.mark.parametrize(
    ("first", "others", "told"),
    [
        (lambda: dist.broadcast(zeros(4), 0), lambda: dist.broadcast(zeros(6), 0), "about the size of"),
        (lambda: dist.broadcast(zeros(4), 0), lambda: dist.broadcast(zeros(4), 1), "about the root of"),
        (lambda: dist.broadcast(zeros(6), 0), lambda: dist.broadcast(zeros(2, 3), 0), "about the shape of"),
        (lambda: dist.all_reduce(zeros(4)), lambda: dist.all_reduce(zeros(4), dist.ReduceOp.MAX), "about the reduce operation of"),
        (lambda: dist.all_reduce(zeros(4)), lambda: dist.all_reduce(zeros(4, dtype=torch.int32)), "about the dtype of"),
        (lambda: dist.reduce(zeros(4), 1), lambda: dist.reduce(zeros(4), 0), "about the root of"),
        (
            lambda: dist.all_gather([zeros(2) for _ in range(2)], zeros(2)),
            lambda: dist.all_gather([zeros(1, 2) for _ in range(2)], zeros(1, 2)),
            "about the shape of",
        ),
        (lambda: dist.gather(zeros(3), [zeros(2), zeros(2)], 0), lambda: dist.gather(zeros(2), dst=0), None),
        (lambda: dist.scatter(zeros(2), [zeros(2), zeros(2)], 0), lambda: dist.scatter(zeros(3), src=0), "about the size of"),
        (
            lambda: dist.all_to_all_single(zeros(4), zeros(4), [1, 3], [1, 3]),
            lambda: dist.all_to_all_single(zeros(4), zeros(4), [2, 2], [2, 2]),
            "about the size of",
        ),
        (lambda: dist.barrier(), lambda: dist.all_reduce(zeros(1)), "different order"),
        (lambda: dist.barrier(), lambda: dist.monitored_barrier(), "about the form of"),
        (
            lambda: (dist.all_reduce(zeros(1)), dist.broadcast(zeros(1), 0)),
            lambda: (dist.broadcast(zeros(1), 0), dist.all_reduce(zeros(1))),
            "different order",
        ),
    ],
)
def test_the_calls_of_a_collective(first, others, told):
    text = error_of(both(first, others))
    if told is None:  # PyTorch sees this one for itself.
        assert "raised" in text
        return
    assert told in text.splitlines()[0]
    assert "Rank 0 of 2 calls" in text and "Rank 1 of 2 calls" in text
    assert text.count("tests/test_mismatches.py, line") >= 2
    assert "terminate" not in text


def test_pieces_are_told_in_full():
    uneven = lambda *into: lambda: dist.all_to_all_single(zeros(4), zeros(4), [2, 2], list(into))  # noqa: E731
    text = error_of(both(uneven(2, 2), uneven(1, 3)))
    assert "Rank 1 of 2 calls all_to_all_single with float32[1], float32[3] out, 2 × float32[2] in:" in text


def test_a_collective_in_a_group():
    def unequal():
        group = dist.new_group([0, 2])
        if dist.get_rank() != 1:
            dist.broadcast(zeros(1 + dist.get_rank()), 0, group=group)

    text = error_of(unequal, world_size=3)
    assert text.startswith("Ranks disagree about the size of collective number 1 on the group of ranks 0 and 2.")


def test_what_went_wrong_after_a_mismatch_is_told_too():
    def unequal():
        if dist.get_rank() == 0:
            dist.send(zeros(2), 1)
        else:
            x = torch.ones(4)
            dist.recv(x, 0)
            assert x.sum() == 0, "not all zeros"

    text = error_of(unequal)
    assert text.startswith("The two ends of a message differ in size.")
    assert "And then: Rank 1 of 2 raised AssertionError: not all zeros" in text


def test_a_mismatch_in_a_run_that_hangs():
    """Gloo passes the first message, and the ranks then wait for each other: what came first is told."""

    def unequal():
        if dist.get_rank() == 0:
            dist.send(zeros(2), 1)
            dist.recv(zeros(1), 1)
        else:
            dist.recv(zeros(4), 0)
            dist.recv(zeros(1), 0)

    with pytest.raises(RankError) as caught:
        run(unequal, world_size=2)
    assert str(caught.value).startswith("The two ends of a message differ in size.")
    assert "And then: Deadlock: both ranks wait for what can never come." in str(caught.value)


def test_no_mismatch_where_there_is_none():
    """Uneven pieces, gathers of views, several shapes after each other: all that is allowed."""

    def fine():
        rank, size = dist.get_rank(), dist.get_world_size()
        splits = [1 + (rank + other) % 3 for other in range(size)]
        dist.all_to_all_single(zeros(sum(splits), 2), zeros(sum(splits), 2), splits, splits)
        whole = zeros(size, 2)
        dist.all_gather(list(whole), zeros(2))
        dist.all_to_all([zeros(2) for _ in range(size)], [zeros(2)] * size)
        for number in range(3):
            dist.broadcast(zeros(number), number)
        dist.all_reduce(torch.zeros(3, 2).t())
        dist.gather(zeros(2), list(whole) if rank == 0 else None, dst=0)
        dist.send(zeros(3, 2).t().contiguous(), (rank + 1) % size) if rank % 2 else dist.recv(zeros(2, 3), (rank - 1) % size)

    run(fine, world_size=4)


# --- leftovers ----------------------------------------------------------------------------------------------------


def test_a_send_that_nobody_received_is_a_warning_if_nobody_waited_for_it(capsys):
    def leave():
        if dist.get_rank() == 0:
            for _ in range(3):
                dist.isend(zeros(4), 1)
        return 7

    job = run(leave, world_size=2)
    assert job.results == [7, 7]
    (warning,) = job.warnings
    assert warning.startswith("Rank 0 of 2 sends float32[4] (16 bytes) to rank 1 (3 times):\n  tests/test_mismatches.py, line ")
    assert warning.endswith("      dist.isend(zeros(4), 1)\nNobody received it.")
    assert capsys.readouterr().out == f"Warning: {warning}\n"


def test_a_send_that_was_not_waited_for_is_a_warning_though_it_came():
    def leave():
        if dist.get_rank() == 0:
            work = dist.isend(zeros(4), 1)
            dist.barrier()
            del work
        else:
            dist.recv(zeros(4), 0)
            dist.barrier()

    (warning,) = run(leave, world_size=2).warnings
    assert warning.endswith(
        "It was not waited for. A send that is let go of before it is through is lost: keep what isend returns, and call wait()."
    )


def test_a_receive_that_was_not_waited_for_is_a_warning():
    def leave():
        x = zeros(4)
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.irecv(x, 0)

    (warning,) = run(leave, world_size=2).warnings
    assert warning.startswith("Rank 1 of 2 receives float32[4] (16 bytes) from rank 0:\n")
    assert warning.endswith("Call wait() on what irecv returned.")


def test_a_receive_that_nobody_sent_anything_for_is_a_warning():
    def leave():
        if dist.get_rank() == 1:
            dist.irecv(zeros(4), 0)

    (warning,) = run(leave, world_size=2).warnings
    assert warning.endswith("Nothing was sent, so its tensor holds what it held before.")


def test_a_collective_that_some_left_out_and_nobody_waited_for():
    def leave():
        if dist.get_rank() == 0:
            dist.all_reduce(zeros(4), async_op=True)

    text = error_of(leave, world_size=3)
    assert "Rank 0 of 3 calls all_reduce(SUM) with float32[4] (16 bytes):\n  tests/test_mismatches.py, line" in text
    assert "Ranks 1 and 2" in text and "never called it" in text


def test_no_warning_where_all_is_well(capsys):
    run(message(zeros(1), zeros(1), tag=3), world_size=2)
    assert capsys.readouterr().out == ""
