"""Deadlocks: each hang is explained, within a second, in the same words; and nothing that only looks like one is."""

import linecache
import math
import re
import time

import pytest

import hangs
from allhands import RankDeadlock, RankTimeout, run

pytestmark = pytest.mark.usefixtures("clean")

LOOKS_LIKE_ONE = {
    "one_sleeps": 3,
    "one_computes": 2,
    "much_in_flight": 2,
    "another_thread_sends_later": 2,
    "a_thread_of_one_that_has_finished_sends_later": 2,
    "thousands_of_quick_messages": 3,
    "one_is_stopped": 2,
    "a_group_that_one_makes_later": 2,
    "a_slow_backward": 2,
    "begun_long_before_it_is_awaited": 2,
    "a_wait_with_a_time_of_its_own": 2,
    "a_barrier_with_a_time_of_its_own": 2,
    "a_group_with_a_time_of_its_own": 2,
    "a_collective_that_was_refused": 2,
    "a_callback_that_sends": 3,
    "a_future_with_a_time_of_its_own": 2,
    "a_pool_of_threads": 2,
    "a_world_of_fewer_ranks": 3,
    "two_receives_of_which_one_is_from_anybody": 3,
}

# What is said of each hang; HERE stands for its line in hangs.py, which must be the one that is shown below it.
HANGS = {
    "everybody_receives_first": (
        3,
        """\
Deadlock: all 3 ranks wait for what can never come.

All 3 ranks wait to receive float32[4] (16 bytes): 0 from 1, 1 from 2, 2 from 0:
  HERE
      dist.recv(x, (rank + 1) % size)

0 waits for 1, 1 for 2, 2 for 0: everybody receives first, and nobody sends.
Let one of them send first, or start with irecv and wait after the send.
""",
    ),
    "everybody_sends_first": (
        3,
        """\
Deadlock: all 3 ranks wait for what can never come.

All 3 ranks wait to send float32[4] (16 bytes): 0 to 1, 1 to 2, 2 to 0:
  HERE
      dist.send(x, (rank + 1) % size)

0 waits for 1, 1 for 2, 2 for 0: everybody sends first, and nobody receives. Even a small send waits for its receiver.
Let one of them receive first, or start with isend and wait after the receive.
""",
    ),
    "everybody_waits_for_his_isend": (
        3,
        """\
Deadlock: all 3 ranks wait for what can never come.

All 3 ranks wait to send float32[4] (16 bytes): 0 to 1, 1 to 2, 2 to 0:
  HERE
      work = dist.isend(torch.zeros(4), (rank + 1) % size)

0 waits for 1, 1 for 2, 2 for 0: everybody sends first, and nobody receives. Even a small send waits for its receiver.
Let one of them receive first, or start with isend and wait after the receive.
""",
    ),
    "receive_from_one_that_has_finished": (
        3,
        """\
Deadlock: rank 1 of 3 waits for what can never come.

Rank 1 of 3 waits to receive int64[2, 3] (48 bytes) from rank 2:
  HERE
      dist.recv(torch.zeros(2, 3, dtype=torch.int64), 2)

Rank 2 has already finished. It sent nothing to rank 1.
Every send needs its recv, and every recv its send: count them on both sides.
""",
    ),
    "send_to_one_that_has_finished": (
        3,
        """\
Deadlock: rank 0 of 3 waits for what can never come.

Rank 0 of 3 waits to send float32[] (4 bytes) to rank 2:
  HERE
      dist.send(torch.tensor(1.0), 2)

Rank 2 has already finished. It received nothing from rank 0.
Every send needs its recv, and every recv its send: count them on both sides.
""",
    ),
    "one_message_too_few": (
        3,
        """\
Deadlock: rank 1 of 3 waits for what can never come.

Rank 1 of 3 waits to receive float32[1] (4 bytes) from rank 0:
  HERE
      dist.recv(torch.zeros(1), 0)

Rank 0 has already finished. It sent 2 messages to rank 1.
Every send needs its recv, and every recv its send: count them on both sides.
""",
    ),
    "one_round_too_many": (
        3,
        """\
Deadlock: rank 0 of 3 waits for what can never come.

Rank 0 of 3 waits to receive float32[1] (4 bytes) from rank 2:
  HERE
      dist.recv(torch.zeros(1), (rank - 1) % size)

Rank 2 has already finished. It sent 2 messages to rank 0.
Every send needs its recv, and every recv its send: count them on both sides.
""",
    ),
    "one_answer_too_few": (
        3,
        """\
Deadlock: ranks 0-1 of 3 wait for what can never come.

Rank 0 of 3 waits to receive float32[1] (4 bytes) from rank 1:
  HERE
      dist.recv(torch.zeros(1), 1)

Rank 1 of 3 waits to receive float32[1] (4 bytes) from rank 0:
  HERE
      dist.recv(torch.zeros(1), 0)

0 waits for 1, 1 for 0: everybody waits to receive, and nobody sends.
Does one of them leave out a send, or send it to another rank?
""",
    ),
    "another_tag": (
        3,
        """\
Deadlock: ranks 0-1 of 3 wait for what can never come.

Rank 0 of 3 waits to send float32[1] (4 bytes) to rank 1 with tag 7:
  HERE
      dist.send(torch.zeros(1), 1, tag=7)

Rank 1 of 3 waits to receive float32[1] (4 bytes) from rank 0 with tag 8:
  HERE
      dist.recv(torch.zeros(1), 0, tag=8)

The tags differ: rank 1 receives with tag 8, rank 0 sends with tag 7.
""",
    ),
    "another_group": (
        3,
        """\
Deadlock: ranks 0-1 of 3 wait for what can never come.

Rank 0 of 3 waits to send float32[1] (4 bytes) to rank 1 on the group of ranks 0 and 1:
  HERE
      dist.send(torch.zeros(1), 1, group=group)

Rank 1 of 3 waits to receive float32[1] (4 bytes) from rank 0:
  HERE
      dist.recv(torch.zeros(1), 0)

The groups differ: rank 1 receives on the world, rank 0 sends on the group of ranks 0 and 1.
""",
    ),
    "from_anybody_and_nobody_is_left": (
        3,
        """\
Deadlock: rank 0 of 3 waits for what can never come.

Rank 0 of 3 waits to receive float32[1] (4 bytes) from whoever sends:
  HERE
      dist.recv(torch.zeros(1))

Ranks 1 and 2 have already finished: nobody is left who could send.
Every send needs its recv, and every recv its send: count them on both sides.
""",
    ),
    "two_of_many": (
        4,
        """\
Deadlock: ranks 0-1 of 4 wait for what can never come.

Ranks 0-1 of 4 wait to receive float32[1] (4 bytes): 0 from 1, 1 from 0:
  HERE
      dist.recv(torch.zeros(1), 1 - rank)

0 waits for 1, 1 for 0: everybody receives first, and nobody sends.
Let one of them send first, or start with irecv and wait after the send.
""",
    ),
    "two_while_others_talk": (
        4,
        """\
Deadlock: ranks 0-1 of 4 wait for what can never come.

Ranks 0-1 of 4 wait to receive float32[1] (4 bytes): 0 from 1, 1 from 0:
  HERE
      dist.recv(torch.zeros(1), 1 - rank)

0 waits for 1, 1 for 0: everybody receives first, and nobody sends.
Let one of them send first, or start with irecv and wait after the send.
""",
    ),
    "after_two_seconds_of_work": (
        2,
        """\
Deadlock: both ranks wait for what can never come.

Rank 0 of 2 waits to receive float32[1] (4 bytes) from rank 1:
  HERE
      dist.recv(torch.zeros(1), 1)

Rank 1 of 2 waits to receive float32[1] (4 bytes) from rank 0:
  HERE
      dist.recv(torch.zeros(1), 0)

0 waits for 1, 1 for 0: everybody receives first, and nobody sends.
Let one of them send first, or start with irecv and wait after the send.
""",
    ),
    "two_threads_that_both_wait": (
        2,
        """\
Deadlock: both ranks wait for what can never come.

Rank 0 of 2 waits to receive float32[1] (4 bytes) from rank 1:
  HERE
      dist.recv(torch.zeros(1), 1)

Rank 1 of 2 waits to receive float32[1] (4 bytes) from rank 0:
  HERE
      dist.recv(torch.zeros(1), 0)

0 waits for 1, 1 for 0: everybody receives first, and nobody sends.
Let one of them send first, or start with irecv and wait after the send.
""",
    ),
    "an_isend_that_was_not_kept": (
        2,
        """\
Deadlock: rank 1 of 2 waits for what can never come.

Rank 1 of 2 waits to receive float32[1] (4 bytes) from rank 0:
  HERE
      dist.recv(torch.zeros(1), 0)

Rank 0 did send it, but with an isend that it did not wait for.
A send that is let go of before it is through is lost: keep what isend returns, and call wait().
""",
    ),
    "from_anybody_where_there_is_nobody": (
        1,
        """\
Deadlock: the only rank waits for what can never come.

The only rank waits to receive float32[1] (4 bytes) from whoever sends:
  HERE
      dist.recv(torch.zeros(1))

There is no other rank that could send.
""",
    ),
    "some_do_not_call": (
        3,
        """\
Deadlock: ranks 0-1 of 3 wait for what can never come.

Ranks 0-1 of 3 wait in all_reduce(SUM) with float32[4] (16 bytes):
  HERE
      dist.all_reduce(torch.zeros(4))

Rank 2 has already finished, and never called it: it is collective number 1 of its group.
All ranks of a group have to call a collective. Is it in an if, or in a loop that is shorter on some ranks?
""",
    ),
    "a_barrier_in_an_if": (
        3,
        """\
Deadlock: ranks 0-1 of 3 wait for what can never come.

Ranks 0-1 of 3 wait in barrier:
  HERE
      dist.barrier()

Rank 2 has already finished, and never called it: it is collective number 1 of its group.
All ranks of a group have to call a collective. Is it in an if, or in a loop that is shorter on some ranks?
""",
    ),
    "a_barrier_before_the_send": (
        3,
        """\
Deadlock: all 3 ranks wait for what can never come.

Rank 0 of 3 waits to receive float32[1] (4 bytes) from rank 1:
  HERE
      dist.recv(torch.zeros(1), 1)

Ranks 1-2 of 3 wait in barrier:
  HERE
      dist.barrier()

0 waits for 1, 1 for 0, 2 for 0: each waits for another one to go on.
What one rank does first, another does later: put them into one order.
""",
    ),
    "the_root_leaves_out_its_broadcast": (
        3,
        """\
Deadlock: ranks 1-2 of 3 wait for what can never come.

Ranks 1-2 of 3 wait in broadcast(from rank 0) with float32[3] (12 bytes):
  HERE
      dist.broadcast(torch.zeros(3), src=0)

Rank 0 has already finished, and never called it: it is collective number 1 of its group.
All ranks of a group have to call a collective. Is it in an if, or in a loop that is shorter on some ranks?
""",
    ),
    "awaited_later": (
        3,
        """\
Deadlock: rank 0 of 3 waits for what can never come.

Rank 0 of 3 waits in all_reduce(SUM) with float32[4] (16 bytes):
  HERE
      work = dist.all_reduce(torch.zeros(4), async_op=True)

Ranks 1 and 2 have already finished, and never called it: it is collective number 1 of its group.
All ranks of a group have to call a collective. Is it in an if, or in a loop that is shorter on some ranks?
""",
    ),
    "a_functional_collective_against_a_receive": (
        3,
        """\
Deadlock: ranks 0-1 of 3 wait for what can never come.

Rank 0 of 3 waits in all_reduce(SUM) with float32[1] (4 bytes):
  HERE
      functional.wait_tensor(functional.all_reduce(torch.zeros(1), "sum", dist.group.WORLD))

Rank 1 of 3 waits to receive float32[1] (4 bytes) from rank 0:
  HERE
      dist.recv(torch.zeros(1), 0)

0 waits for 1, 1 for 0: each waits for another one to go on.
What one rank does first, another does later: put them into one order.
""",
    ),
    "not_all_of_a_group": (
        3,
        """\
Deadlock: ranks 0-1 of 3 wait for what can never come.

Ranks 0-1 of 3 wait in all_reduce(SUM) with float32[4] (16 bytes) on the group of ranks 0, 1 and 2:
  HERE
      dist.all_reduce(torch.zeros(4), group=group)

Rank 2 has already finished, and never called it: it is collective number 1 of its group.
All ranks of a group have to call a collective. Is it in an if, or in a loop that is shorter on some ranks?
""",
    ),
    "groups_that_cross": (
        3,
        """\
Deadlock: ranks 0-1 of 3 wait for what can never come.

Rank 0 of 3 waits in all_reduce(SUM) with float32[1] (4 bytes) on the second group of ranks 0 and 1:
  HERE
      dist.all_reduce(torch.zeros(1), group=group)

Rank 1 of 3 waits in all_reduce(SUM) with float32[1] (4 bytes) on the first group of ranks 0 and 1:
  HERE
      dist.all_reduce(torch.zeros(1), group=group)

0 waits for 1, 1 for 0: each waits for another one to go on.
What one rank does first, another does later: put them into one order.
""",
    ),
    "a_group_that_one_did_not_make": (
        3,
        """\
Deadlock: rank 0 of 3 waits for what can never come.

Rank 0 of 3 waits to make the group of ranks 0 and 1:
  HERE
      dist.new_group([0, 1])

Rank 1 has already finished, and never called new_group for it.
All ranks have to call dist.new_group for every group, in the same order, also the ranks that are not in it.
""",
    ),
    "one_batch_short": (
        3,
        """\
Deadlock: ranks 0,2 of 3 wait for what can never come.

Ranks 0,2 of 3 wait in all_reduce(SUM) with float32[20] (80 bytes) in backward:
  HERE
      model(torch.zeros(2, 4)).sum().backward()

Rank 1 has already finished, and never called it: it is collective number 8 of its group.
DDP exchanges gradients in every backward: give all ranks the same number of batches (or use the join() context of DistributedDataParallel).
""",
    ),
    "in_backward_against_a_receive": (
        3,
        """\
Deadlock: all 3 ranks wait for what can never come.

Ranks 0,2 of 3 wait in all_reduce(SUM) with float32[20] (80 bytes) in backward:
  HERE
      model(torch.zeros(2, 4)).sum().backward()

Rank 1 of 3 waits to receive float32[1] (4 bytes) from rank 0:
  HERE
      dist.recv(torch.zeros(1), 0)

0 waits for 1, 1 for 0, 2 for 1: each waits for another one to go on.
What one rank does first, another does later: put them into one order.
""",
    ),
}


def without_places(text, name):
    """A text with HERE for each place in hangs.py, when the line that is shown is indeed there."""
    places = re.findall(r"^  tests/hangs\.py, line (\d+), in (\w+)\n      (.*)$", text, re.MULTILINE)
    for number, function, line in places:
        assert function == name and linecache.getline(hangs.__file__, int(number)).strip() == line
    return re.sub(r"tests/hangs\.py, line \d+, in \w+", "HERE", text)


LATER = {
    "an_isend_that_was_not_kept": 2.5,  # It could still be on its way.
    "a_functional_collective_against_a_receive": 2.5,  # The first one of a process imports half a compiler, before it can hang.
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_explained_within_a_second(name):
    world_size, told = HANGS[name]
    with pytest.raises(RankDeadlock) as caught:
        run(getattr(hangs, name), world_size=world_size)
    formed = max(float(line) for text in caught.value.output for line in text.split())
    assert time.monotonic() - formed < LATER.get(name, 1)
    assert without_places(str(caught.value), name) == told.removesuffix("\n")


@pytest.mark.parametrize("name", LOOKS_LIKE_ONE)
def test_what_only_looks_like_a_hang(name):
    run(getattr(hangs, name), world_size=LOOKS_LIKE_ONE[name])


@pytest.mark.parametrize("timeout", [45 * 60, math.inf])
@pytest.mark.parametrize("name", ["everybody_receives_first", "not_all_of_a_group"])
def test_a_run_without_a_limit_is_looked_after_too(name, timeout):
    """A group's own time-out, half an hour if nobody says, is then shorter than the run's."""
    with pytest.raises(RankDeadlock):
        run(getattr(hangs, name), world_size=3, timeout=timeout)


def test_a_ring_of_many_names_some_of_them():
    with pytest.raises(RankDeadlock) as caught:
        run(hangs.everybody_receives_first, world_size=12)
    assert "All 12 ranks wait to receive float32[4] (16 bytes): 0 from 1, 1 from 2, " in str(caught.value)
    assert ", 6 from 7, …:\n" in str(caught.value)


def test_a_rank_with_a_thread_that_might_help_waits_for_the_time_out_which_then_says_why():
    with pytest.raises(RankTimeout) as caught:
        run(hangs.with_an_idle_thread, world_size=2, timeout=1.5)
    assert not isinstance(caught.value, RankDeadlock)
    assert "0 waits for 1, 1 for 0: everybody receives first, and nobody sends." in str(caught.value)


def test_unrecorded_ranks_hang_until_the_time_out():
    with pytest.raises(RankTimeout) as caught:
        run(hangs.everybody_receives_first, world_size=2, timeout=1, record=False)
    assert "Ranks that wait for each other wait for ever." in str(caught.value)
