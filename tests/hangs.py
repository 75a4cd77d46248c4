"""Programs that hang, each in its own way, and programs that only look like it. Run in ranks by test_deadlocks.py.

A program that hangs calls `now()` just before, so that the test knows how long it took to say so.
"""

import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def now():
    print(time.monotonic())


def me():
    return dist.get_rank(), dist.get_world_size()


# --- messages -----------------------------------------------------------------------------------------------------


def everybody_receives_first():
    rank, size = me()
    x = torch.zeros(4)
    now()
    dist.recv(x, (rank + 1) % size)
    dist.send(x, (rank - 1) % size)


def everybody_sends_first():
    rank, size = me()
    x = torch.zeros(4)
    now()
    dist.send(x, (rank + 1) % size)
    dist.recv(x, (rank - 1) % size)


def everybody_waits_for_his_isend():
    rank, size = me()
    work = dist.isend(torch.zeros(4), (rank + 1) % size)
    now()
    work.wait()
    dist.recv(torch.zeros(4), (rank - 1) % size)


def receive_from_one_that_has_finished():
    now()
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(2, 3, dtype=torch.int64), 2)


def send_to_one_that_has_finished():
    now()
    if dist.get_rank() == 0:
        dist.send(torch.tensor(1.0), 2)


def one_message_too_few():
    now()
    if dist.get_rank() == 0:
        for _ in range(2):
            dist.send(torch.zeros(1), 1)
    if dist.get_rank() == 1:
        for _ in range(3):
            dist.recv(torch.zeros(1), 0)


def one_round_too_many():
    rank, size = me()
    now()
    for _ in range(size - (rank == 2)):
        work = dist.isend(torch.zeros(1), (rank + 1) % size)
        dist.recv(torch.zeros(1), (rank - 1) % size)
        work.wait()


def one_answer_too_few():
    """Messages have gone to and fro, and now both receive."""
    now()
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 1)
        dist.recv(torch.zeros(1), 1)
        dist.recv(torch.zeros(1), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.zeros(1), 0)
        dist.recv(torch.zeros(1), 0)


def another_tag():
    now()
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 1, tag=7)
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0, tag=8)


def another_group():
    group = dist.new_group([0, 1])
    now()
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 1, group=group)
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)


def from_anybody_and_nobody_is_left():
    now()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1))


def two_of_many():
    """The others compute on."""
    rank, _ = me()
    now()
    if rank < 2:
        dist.recv(torch.zeros(1), 1 - rank)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        pass


def two_while_others_talk():
    rank, _ = me()
    now()
    if rank < 2:
        dist.recv(torch.zeros(1), 1 - rank)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if rank == 2:
            dist.send(torch.zeros(1), 3)
        else:
            dist.recv(torch.zeros(1), 2)


def after_two_seconds_of_work():
    rank, _ = me()
    dist.barrier()
    time.sleep(2)
    now()
    if rank:
        dist.recv(torch.zeros(1), 0)
    else:
        dist.recv(torch.zeros(1), 1)


def two_threads_that_both_wait():
    rank, _ = me()
    now()
    if rank == 0:
        other = threading.Thread(target=dist.recv, args=(torch.zeros(1), 1), kwargs={"tag": 5})
        other.start()
        dist.recv(torch.zeros(1), 1)
    else:
        dist.recv(torch.zeros(1), 0)


def an_isend_that_was_not_kept():
    rank, _ = me()
    if rank == 0:
        dist.isend(torch.zeros(1), 1)
    else:
        time.sleep(0.5)
        now()
        dist.recv(torch.zeros(1), 0)


def from_anybody_where_there_is_nobody():
    now()
    dist.recv(torch.zeros(1))


# --- collectives --------------------------------------------------------------------------------------------------


def some_do_not_call():
    now()
    if dist.get_rank() != 2:
        dist.all_reduce(torch.zeros(4))


def a_barrier_in_an_if():
    now()
    if dist.get_rank() < 2:
        dist.barrier()


def a_barrier_before_the_send():
    rank, _ = me()
    now()
    if rank == 0:
        dist.recv(torch.zeros(1), 1)
    dist.barrier()
    if rank == 1:
        dist.send(torch.zeros(1), 0)


def the_root_leaves_out_its_broadcast():
    now()
    if dist.get_rank() != 0:
        dist.broadcast(torch.zeros(3), src=0)


def awaited_later():
    now()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.zeros(4), async_op=True)
        work.wait()


def a_functional_collective_against_a_receive():
    """It is C++ that waits for it."""
    now()
    if dist.get_rank() == 0:
        functional.wait_tensor(functional.all_reduce(torch.zeros(1), "sum", dist.group.WORLD))
    else:
        dist.recv(torch.zeros(1), 0)


def not_all_of_a_group():
    group = dist.new_group([0, 1, 2])
    now()
    if dist.get_rank() < 2:
        dist.all_reduce(torch.zeros(4), group=group)


def groups_that_cross():
    """Each rank uses both groups, but not in the same order."""
    rank, _ = me()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    now()
    for group in (first, second) if rank else (second, first):
        if rank < 2:
            dist.all_reduce(torch.zeros(1), group=group)


def a_group_that_one_did_not_make():
    now()
    if dist.get_rank() == 0:
        dist.new_group([0, 1])


def one_batch_short():
    rank, _ = me()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for batch in range(3):
        now()
        if not (rank == 1 and batch == 2):
            model(torch.zeros(2, 4)).sum().backward()


def in_backward_against_a_receive():
    rank, _ = me()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    now()
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
    model(torch.zeros(2, 4)).sum().backward()
    if rank == 0:
        dist.send(torch.zeros(1), 1)


# --- and what only looks like it ----------------------------------------------------------------------------------


def one_sleeps():
    if dist.get_rank() == 0:
        time.sleep(3)
        dist.send(torch.zeros(1), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
    dist.all_reduce(torch.zeros(1))


def one_computes():
    if dist.get_rank() == 0:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            torch.ones(100, 100) @ torch.ones(100, 100)
    dist.barrier()


def much_in_flight():
    rank, size = me()
    out, into = torch.ones(60_000_000), torch.zeros(60_000_000)
    works = [dist.isend(out, (rank + 1) % size), dist.irecv(into, (rank - 1) % size)]
    for work in works:
        work.wait()
    assert into.sum() == 60_000_000


def another_thread_sends_later():
    def later():
        time.sleep(1.5)
        dist.send(torch.zeros(1), 1)

    if dist.get_rank() == 0:
        thread = threading.Thread(target=later)
        thread.start()
        dist.recv(torch.zeros(1), 1)
        thread.join()
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.zeros(1), 0)


def a_thread_of_one_that_has_finished_sends_later():
    def later():
        time.sleep(1.5)
        dist.send(torch.zeros(1), 1)

    if dist.get_rank() == 0:
        threading.Thread(target=later, daemon=True).start()
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)


def thousands_of_quick_messages():
    rank, size = me()
    x, y = torch.zeros(4), torch.zeros(4)
    for _ in range(3000):
        works = [dist.isend(x, (rank + 1) % size), dist.irecv(y, (rank - 1) % size)]
        for work in works:
            work.wait()


def one_is_stopped():
    rank, _ = me()
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        waker = os.fork()
        if waker == 0:
            time.sleep(2)
            os.kill(pids[1], signal.SIGCONT)
            os._exit(0)
        dist.recv(torch.zeros(1), 1)
        os.waitpid(waker, 0)
    else:
        dist.send(torch.zeros(1), 0)


def a_group_that_one_makes_later():
    if dist.get_rank() == 1:
        time.sleep(2)
    group = dist.new_group([0, 1])
    dist.barrier(group)


def a_slow_backward():
    """The others wait for its gradients, inside C++."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            if dist.get_rank() == 1:
                time.sleep(2)
            return gradient * 2

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2):
        Slow.apply(model(torch.zeros(2, 4))).sum().backward()


def begun_long_before_it_is_awaited():
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        time.sleep(2)
        work.wait()
    else:
        time.sleep(1)
        dist.all_reduce(torch.zeros(1))


def a_wait_with_a_time_of_its_own():
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.irecv(torch.zeros(1), 1).wait(timedelta(seconds=1))


def a_barrier_with_a_time_of_its_own():
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=1))


def a_group_with_a_time_of_its_own():
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=group)


def a_collective_that_was_refused():
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_gather([torch.zeros(3)] * 3, torch.zeros(3))
        with pytest.raises(RuntimeError):
            dist.irecv(torch.zeros(3), 0)
    dist.barrier()


def a_world_of_fewer_ranks():
    rank, size = me()
    where = [f"{tempfile.mkdtemp()}/store"]
    dist.broadcast_object_list(where, 0)
    dist.destroy_process_group()
    if rank:
        dist.init_process_group("gloo", init_method=f"file://{where[0]}", rank=rank - 1, world_size=size - 1)
        if rank == 1:
            time.sleep(1)
            dist.send(torch.zeros(1), 1)
        if rank == 2:
            dist.recv(torch.zeros(1), 0)
        group = dist.new_group([1, 0])
        dist.all_reduce(torch.zeros(1), group=group)


def two_receives_of_which_one_is_from_anybody():
    """Who got whose message is known only when both are through."""
    rank, _ = me()
    if rank == 0:
        first = dist.irecv(torch.zeros(4))
        dist.barrier()
        time.sleep(1)
        dist.recv(torch.zeros(8), 1)
        first.wait()
    elif rank == 2:
        dist.send(torch.zeros(4), 0)
        dist.barrier()
    else:
        dist.barrier()
        dist.send(torch.zeros(8), 0)


def a_callback_that_sends():
    """When the all_reduce is over, which rank 2 comes late to, rank 0 sends, in whatever thread."""
    rank, _ = me()
    if rank == 0:
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        done = work.get_future().then(lambda _: dist.send(torch.zeros(1), 1))
        dist.recv(torch.zeros(1), 1)
        done.wait()
    elif rank == 1:
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.zeros(1), 0)
        work.wait()
    else:
        time.sleep(1.5)
        dist.all_reduce(torch.zeros(1))


def a_future_with_a_time_of_its_own():
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
        with pytest.raises(RuntimeError):
            work.get_future().wait()


def a_pool_of_threads():
    """Its threads are idle when the program ends."""
    global pool
    pool = ThreadPoolExecutor(2)
    assert pool.submit(dist.get_rank).result() == dist.get_rank()


def with_an_idle_thread():
    """It could send, for all that anybody knows."""
    rank, _ = me()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    dist.recv(torch.zeros(1), 1 - rank)
