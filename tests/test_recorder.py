"""What the recorder writes down: of a learner's own messages, and of what PyTorch's own parallel training sends."""

import os
import tracemalloc

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from allhands import run
from allhands.events import ROW, Kind, RankFile
from allhands.trace import Trace

pytestmark = pytest.mark.usefixtures("fork_server")


def sites(job, rank=0):
    """What a rank did: name, what it gave, what it took."""
    return [(event.site.name, event.site.given, event.site.taken) for event in job.trace if event.site.rank == rank]


def kinds(job):
    """The calls of each kind, in all ranks."""
    return {name: tally.calls for name, tally in job.trace.ledger().kinds.items()}


# --- messages -----------------------------------------------------------------------------------------------------


def test_every_kind_of_message():
    def talk():
        rank, size = dist.get_rank(), dist.get_world_size()
        right, left = (rank + 1) % size, (rank - 1) % size
        a, b = torch.ones(2, 3), torch.zeros(2, 3)
        for work in (dist.isend(a, right), dist.irecv(b, left)):
            work.wait()
        ops = [dist.P2POp(dist.isend, a[0], right), dist.P2POp(dist.irecv, b[0], left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if rank == 0:
            dist.send(torch.tensor(True), 1, tag=3)
        if rank == 1:
            assert dist.recv(torch.tensor(False), tag=3) == 0
        return b.sum().item(), dist.get_backend()

    job = run(talk, world_size=3)
    assert job.results == [(6.0, "gloo")] * 3
    mine = [event.site for event in job.trace if event.site.rank == 1]
    assert [(site.kind, site.peer, site.tag, site.dtype, site.shapes) for site in mine] == [
        (Kind.SEND, 2, 0, "float32", ((2, 3),)),
        (Kind.RECV, 0, 0, "float32", ((2, 3),)),
        (Kind.SEND, 2, 0, "float32", ((3,),)),
        (Kind.RECV, 0, 0, "float32", ((3,),)),
        (Kind.RECV, 0, 3, "bool", ((),)),
    ]
    assert [(site.bytes_out, site.bytes_in) for site in mine] == [(24, 0), (0, 24), (12, 0), (0, 12), (0, 1)]
    assert mine[-1].is_from_any
    assert [frame.function for frame in mine[0].place] == ["talk"]
    assert (job.trace.matching.partner >= 0).all()


def test_an_operation_is_waited_for_when_the_program_says_so():
    def talk():
        if dist.get_rank() == 0:
            first, second = dist.isend(torch.ones(1), 1), dist.isend(torch.ones(1), 1)
            second.wait()
            first.wait()
            with pytest.raises(RuntimeError, match="waited for already, and gloo would wait for ever"):
                first.wait()
            work = dist.all_reduce(torch.ones(1), async_op=True)
            work.wait()
            work.wait()
        else:
            for work in [dist.irecv(torch.ones(1), 0) for _ in range(2)]:
                work.wait()
            work = dist.all_reduce(torch.ones(1), async_op=True)
            while not work.is_completed():
                pass

    one, other, _, *received = run(talk, world_size=2).trace
    assert one.issued < other.issued < other.waited < other.over < one.waited < one.over
    assert all(event.over for event in received)


def test_groups_and_their_ranks():
    def talk():
        evens, odds = dist.new_group([0, 2]), dist.new_group([3, 1])
        mine = odds if dist.get_rank() % 2 else evens
        dist.all_reduce(torch.ones(1), group=mine)
        if dist.get_rank() == 3:
            dist.send(torch.ones(1), 1, group=odds)
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 3, group=odds)

    trace = run(talk).trace
    assert trace.columns.groups == [(0, 1, 2, 3), (0, 2), (1, 3)] or trace.columns.groups == [(0, 1, 2, 3), (0, 2), (3, 1)]
    assert [event.site.peer for event in trace if event.site.kind in (Kind.SEND, Kind.RECV)] == [3, 1]
    assert trace.matching.number_of_meetings == 4  # two groups made, one all_reduce on each


def test_every_collective():
    def talk():
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.ones(2)
        dist.broadcast(x, 1)
        dist.reduce(x, 1, op=dist.ReduceOp.MAX)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        dist.scatter(x, [torch.ones(2)] * size if rank == 1 else None, src=1)
        dist.gather(x, [torch.empty(2) for _ in range(size)] if rank == 1 else None, dst=1)
        dist.all_gather([torch.empty(2) for _ in range(size)], x)
        dist.reduce_scatter(x, [torch.ones(2)] * size)
        dist.all_to_all([torch.empty(2) for _ in range(size)], [torch.ones(2)] * size)
        dist.barrier()
        dist.monitored_barrier()
        dist.all_to_all_single(torch.empty(3), torch.ones(3))

    job = run(talk, world_size=3)
    two, three = ((2,),), ((2,),) * 3
    assert sites(job, rank=1) == [
        ("broadcast", two, ()),
        ("reduce", two, two),
        ("all_reduce", two, two),
        ("scatter", three, two),
        ("gather", two, three),
        ("all_gather", two, three),
        ("reduce_scatter", three, two),
        ("all_to_all", three, three),
        ("barrier", (), ()),
        ("monitored_barrier", (), ()),
        ("all_to_all_single", ((1,),) * 3, ((1,),) * 3),
    ]
    assert sites(job, rank=0)[:5] == [
        ("broadcast", (), two),
        ("reduce", two, ()),
        ("all_reduce", two, two),
        ("scatter", (), two),
        ("gather", two, ()),
    ]
    assert [event.site.reduce_op for event in job.trace if event.site.kind in (Kind.REDUCE, Kind.ALL_REDUCE)] == ["MAX", "AVG"] * 3


def test_objects():
    def talk():
        size = dist.get_world_size()
        gathered = [None] * size
        dist.all_gather_object(gathered, {"rank": dist.get_rank()})
        told = ["hello"] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(told, 0)
        return gathered[1]["rank"], told

    job = run(talk, world_size=2)
    assert job.results == [(1, ["hello"])] * 2
    assert kinds(job) == {"all_gather": 4, "broadcast": 4}  # of each two: the sizes, and then the bytes


def test_torchs_functional_collectives_are_seen_with_their_waits():
    def talk():
        return (functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1).tolist()

    job = run(talk, world_size=2)
    assert job.results == [[3.0] * 3] * 2
    assert all(event.site.name == "all_reduce" and event.waited for event in job.trace)


def test_torchs_functional_gathers_and_dtensors():
    def talk():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        group = dist.group.WORLD
        gathered = functional.all_gather_tensor(torch.ones(2) * dist.get_rank(), 0, group) + 0
        scattered = functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, group) + 0
        whole = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)]).redistribute(placements=[Replicate()])
        return gathered.tolist(), scattered.tolist(), whole.to_local().tolist()

    job = run(talk, world_size=2)
    assert job.results == [([0.0, 0.0, 1.0, 1.0], [2.0, 2.0], [0.0, 1.0, 2.0, 3.0])] * 2
    assert kinds(job)["reduce_scatter"] == 2 and kinds(job)["all_gather"] >= 4


@pytest.mark.filterwarnings("ignore")
def test_several_tensors_at_once():
    def talk():
        import warnings

        warnings.simplefilter("ignore")
        x = [torch.ones(3), torch.ones(2, 2)]
        outputs = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(2)]
        dist.all_gather_coalesced(outputs, x)
        dist.all_reduce_coalesced(x)
        return outputs[1][1].sum().item(), x[0][0].item()

    job = run(talk, world_size=2)
    assert job.results == [(4.0, 2.0)] * 2
    assert sites(job) == [("all_gather_coalesced", ((7,),), ((7,), (7,))), ("all_reduce_coalesced", ((7,),), ((7,),))]


def test_sparse_tensors():
    def talk():
        x = torch.tensor([1.0, 0.0, 2.0]).to_sparse()
        dist.all_reduce(x)
        return x.to_dense().tolist()

    job = run(talk, world_size=2)
    assert job.results == [[2.0, 0.0, 4.0]] * 2
    (site, _) = (event.site for event in job.trace)
    assert (site.given, site.bytes_out) == (((3,),), 2 * 8 + 2 * 4)  # two indices, two values


def test_calls_of_the_group_itself():
    """As communication hooks of DDP make them."""

    def talk():
        group = dist.group.WORLD
        x = torch.ones(2)
        group.allreduce([x]).wait()
        group.allreduce(x, dist.ReduceOp.MAX).wait()
        group.broadcast(x, 1).wait()
        group.barrier().wait()
        assert group._get_backend(torch.device("cpu")).size() == 2
        assert [device.type for device in group._device_types] == ["cpu"] and group.get_group_store() is not None
        return x.tolist()

    job = run(talk, world_size=2)
    assert job.results == [[2.0, 2.0]] * 2
    assert [(event.site.name, event.site.reduce_op) for event in job.trace if event.site.rank == 0] == [
        ("all_reduce", "SUM"),
        ("all_reduce", "MAX"),
        ("broadcast", ""),
        ("barrier", ""),
    ]


def test_a_run_that_is_not_recorded():
    def plain():
        dist.all_reduce(torch.ones(1))
        return type(dist.group.WORLD).__name__

    job = run(plain, world_size=2, record=False)
    assert job.results == ["ProcessGroup"] * 2  # PyTorch's own: nothing of ours is in the way, so it costs nothing.
    with pytest.raises(ValueError, match="this run was not recorded: leave record=False"):
        _ = job.trace
    with pytest.raises(ValueError, match="record must be True, False or 'compute'"):
        run(plain, record="all")


def test_a_second_process_group_after_the_first_is_recorded_too(tmp_path):
    def again():
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=int(os.environ["R"]), world_size=1)

    def one():
        os.environ["R"] = "0"
        again()
        dist.all_reduce(torch.ones(1))

    assert kinds(run(one, world_size=1))["all_reduce"] == 1


def test_what_recording_costs_a_message():
    """The program's own time, with a backend that does nothing. `make benchmark` measures the rest."""

    def measure():
        import time

        class Nothing:
            def wait(self):
                return True

        class Backend:
            def send(self, tensors, peer, tag):
                return Nothing()

        group, x = dist.group.WORLD, torch.ones(16)
        group.inner = Backend()
        least = float("inf")
        for _ in range(30):
            start = time.process_time()
            for _ in range(300):
                dist.send(x, 1)
            least = min(least, (time.process_time() - start) / 300)
        return least

    def only_the_first():
        return measure() if dist.get_rank() == 0 else None

    least, _ = run(only_the_first, world_size=2, record=True).results
    assert least < 25e-6


# --- PyTorch's own parallel training ------------------------------------------------------------------------------

# Linear(8, 16) and Linear(16, 4): weights and biases.
FIRST, SECOND = 8 * 16 + 16, 16 * 4 + 4
PARAMETERS = FIRST + SECOND
FLOAT32, INT32, INT64 = 4, 4, 8


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def test_ddp_by_hand():
    iterations, size = 3, 4

    def train():
        parallel = nn.parallel.DistributedDataParallel(model())
        for _ in range(iterations):
            parallel(torch.randn(4, 8)).sum().backward()

    ledger = run(train, world_size=size).trace.ledger()

    # At the start everybody says how many parameters it has, rank 0 says their sizes and strides, and then gives them away.
    number_of_parameters = INT64
    sizes_and_strides = INT64 * (2 * 2 + 2 * 1 + 2 * 2 + 2 * 1)  # a weight has two of each, a bias one
    parameters = FLOAT32 * PARAMETERS
    # After the first iteration rank 0 says in which bucket each of the four parameters is (and how many there are), and how large they are.
    buckets = INT32 * (4 + 1) + INT32 * 1
    # In each backward, one bucket with all gradients.
    gradients = iterations * FLOAT32 * PARAMETERS

    from_root = sizes_and_strides + parameters + buckets
    root, *others = ledger.ranks
    assert root.bytes_out == number_of_parameters + from_root + gradients
    assert root.bytes_in == size * number_of_parameters + gradients
    for other in others:
        assert other.bytes_out == number_of_parameters + gradients
        assert other.bytes_in == size * number_of_parameters + from_root + gradients
    assert ledger.kinds["all_reduce"].bytes_out == size * gradients
    assert ledger.kinds["all_reduce"].calls == size * iterations


def test_fsdp2_by_hand():
    iterations, size = 2, 2

    def train():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size,))
        sharded = model()
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for _ in range(iterations):
            sharded(torch.randn(4, 8)).sum().backward()

    job = run(train, world_size=size)
    ledger = job.trace.ledger()

    # Each layer is gathered twice, for forward and for backward: everybody gives its shard, and gets the whole.
    shards = FLOAT32 * (FIRST // size + SECOND // size)
    gathers = 2 * iterations
    # And its gradients are scattered once: everybody gives the whole, and gets its shard of the sum.
    scatters = iterations
    whole = FLOAT32 * PARAMETERS
    for account in ledger.ranks:
        assert account.bytes_out == gathers * shards + scatters * whole
        assert account.bytes_in == gathers * whole + scatters * shards
        assert account.collectives == 2 * gathers + 2 * scatters
    in_order = [site.shapes for site in (event.site for event in job.trace) if site.rank == 0 and site.kind == Kind.ALL_GATHER]
    assert in_order == [((FIRST // size,),), ((SECOND // size,),), ((SECOND // size,),), ((FIRST // size,),)] * iterations


def test_tensor_parallelism_by_hand():
    size, batch = 2, 4

    def train():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (size,))
        split = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        dist.barrier()
        split(torch.randn(batch, 8)).sum().backward()

    job = run(train, world_size=size)
    after = [event.site for event in job.trace if event.site.rank == 0]
    after = after[[site.name for site in after].index("barrier") + 1 :]
    # Forward: the partial sums of the second layer's output. (The input needs no gradient, so backward has none.)
    assert [(site.name, site.reduce_op, site.bytes_out) for site in after] == [("all_reduce", "SUM", batch * 4 * FLOAT32)]


def test_zero_redundancy_optimizer_by_hand():
    def train():
        from torch.distributed.optim import ZeroRedundancyOptimizer

        layer = nn.Linear(8, 8)
        optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.Adam, lr=1e-3)
        layer(torch.ones(1, 8)).sum().backward()
        optimizer.step()

    ledger = run(train, world_size=2).trace.ledger()
    weight, bias = FLOAT32 * 8 * 8, FLOAT32 * 8  # Each is updated by one rank, which then tells the other.
    assert sorted(account.bytes_out for account in ledger.ranks) == [bias, weight]


def test_pipelining_by_hand():
    size, micro_batches = 2, 4

    def train():
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        rank = dist.get_rank()
        stage = PipelineStage(nn.Linear(8, 8), rank, size, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=micro_batches, loss_fn=lambda output, target: ((output - target) ** 2).mean())
        x = torch.randn(8, 8)
        schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": x}))

    job = run(train, world_size=size)
    activations = [event.site for event in job.trace if event.site.kind == Kind.SEND and event.site.dtype == "float32"]
    assert [site.shapes for site in activations] == [((8 // micro_batches, 8),)] * (2 * micro_batches)  # activations there, gradients back
    assert (job.trace.matching.partner >= 0).all()


# --- what is computed ---------------------------------------------------------------------------------------------


def test_flops_and_bytes_by_hand():
    def train():
        x, w = torch.randn(4, 8), torch.randn(8, 16, requires_grad=True)
        ((x @ w) * 2).sum().backward()

    job = run(train, world_size=2, record="compute")
    computed = {event.site.name: event.site for event in job.trace if event.site.kind == Kind.COMPUTE and event.site.rank == 0}
    multiply = 2 * 4 * 8 * 16
    assert job.trace.ledger().ranks[0].flops == 2 * multiply  # x·w forward; backward xᵀ·g alone, since x needs no gradient
    assert computed["mul"].bytes_in >= 4 * 16 * FLOAT32 and computed["mul"].bytes_out == 4 * 16 * FLOAT32
    products = [event.site for event in job.trace if event.site.name == "mm" and event.site.rank == 0]
    assert [(site.bytes_in, site.bytes_out) for site in products] == [
        (FLOAT32 * (4 * 8 + 8 * 16), FLOAT32 * 4 * 16),
        (FLOAT32 * (8 * 4 + 4 * 16), FLOAT32 * 8 * 16),
    ]
    assert "FLOPs" in repr(job.trace.ledger())
    assert "compute" not in kinds(run(train, world_size=1))


def test_flops_of_a_split_model_are_each_ranks_own():
    def train():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        layers = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False))
        split = parallelize_module(layers, init_device_mesh("cpu", (3,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        split(torch.ones(2, 4)).sum().backward()

    forward = 2 * (2 * 4 * 6) + 2 * (2 * 6 * 4)  # both layers, 2 rows
    backward = 2 * forward - 2 * (2 * 4 * 6)  # twice that, but for the gradient of the input
    job = run(train, world_size=3, record="compute")
    assert [account.flops for account in job.trace.ledger().ranks] == [(forward + backward) // 3] * 3


def test_flops_of_attention():
    def attend():
        q = torch.ones(1, 2, 8, 4, requires_grad=True)
        nn.functional.scaled_dot_product_attention(q, q, q)

    heads, length, width = 2, 8, 4
    flops = run(attend, world_size=1, record="compute").trace.ledger().total.flops
    assert flops == 2 * (2 * heads * length * length * width)  # q·kᵀ, and the weights · v


# --- the file -----------------------------------------------------------------------------------------------------


def test_a_million_operations_fit_in_100_mb(tmp_path):
    number = 1_000_000
    rows = np.zeros(number + 1, ROW)
    rows["site"][1:] = 1 + np.arange(number) % 2
    rows["issued"], rows["waited"], rows["over"] = (np.arange(number + 1) * 3 + k for k in range(3))
    files = []
    for rank in range(2):
        kinds_of_sites = [Kind.SEND, Kind.RECV] if rank == 0 else [Kind.RECV, Kind.SEND]
        lines = [b'{"group": [0, 1]}', b'{"place": []}'] + [
            b'{"site": {"kind": %d, "group": 0, "peer": %d, "tag": 0, "dtype": "int8", "given": [[1]], "taken": [], "bytes_out": 1,'
            b' "bytes_in": 0, "reduce_op": "", "name": "x", "thread": 1, "place": 0, "is_in_backward": false}}' % (kind, 1 - rank)
            for kind in kinds_of_sites
        ]
        (tmp_path / f"tables-{rank}").write_bytes(b"\n".join(lines) + b"\n")
        rows[: number // 2 + 1].tofile(tmp_path / f"rows-{rank}")
        files.append((str(tmp_path / f"rows-{rank}"), str(tmp_path / f"tables-{rank}")))
    assert sum(os.path.getsize(path) for path, _ in files) <= 17 * number
    tracemalloc.start()
    trace = Trace([RankFile.read(*paths) for paths in files])
    assert len(trace) == number and (trace.matching.partner >= 0).all()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100e6


def test_more_operations_than_the_file_first_has_room_for():
    def talk():
        for _ in range(3000):
            if dist.get_rank() == 0:
                dist.send(torch.ones(1), 1)
            else:
                dist.recv(torch.ones(1), 0)
            dist.group.WORLD.size()
        for _ in range(1500):
            dist.barrier()

    job = run(talk, world_size=2)
    assert kinds(job) == {"send": 3000, "recv": 3000, "barrier": 3000}
    ticks = [event.issued for event in job.trace if event.site.rank == 1]
    assert ticks == sorted(ticks) and len(set(ticks)) == 4500


@pytest.mark.parametrize("record", [True, "compute"])
def test_forks_of_a_rank_do_not_write_into_its_record(record):
    """As the workers of a DataLoader."""

    def talk():
        rank = dist.get_rank()
        kept = dist.isend(torch.ones(1), 1 - rank)
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                torch.ones(3, 3) @ torch.ones(3, 3)
                del kept
                os._exit(0)
            os.waitpid(pid, 0)
            dist.recv(torch.ones(1), 1 - rank)
            kept.wait()
            kept = dist.isend(torch.ones(1), 1 - rank)
        dist.recv(torch.ones(1), 1 - rank)
        kept.wait()

    job = run(talk, world_size=2, record=record)
    assert kinds(job)["send"] == kinds(job)["recv"] == 2 * 4
    assert job.warnings == () and job.trace.ledger().total.flops == 0


def test_numbers_that_are_not_pythons():
    def talk():
        import numpy

        for other in numpy.arange(2):
            if dist.get_rank() == 1 - other:
                dist.send(torch.ones(1), other, tag=numpy.int64(3))
            else:
                dist.recv(torch.ones(1), torch.tensor(1) - torch.tensor(other), tag=3)
        splits = [numpy.int64(1), numpy.int64(1)]
        dist.all_to_all_single(torch.zeros(2), torch.zeros(2), splits, splits)

    job = run(talk, world_size=2)
    assert kinds(job) == {"send": 2, "recv": 2, "all_to_all": 2} and (job.trace.columns.over > 0).all()


def test_many_threads_write_into_one_file():
    def talk():
        import threading

        def messages(tag):
            for _ in range(700):
                if dist.get_rank() == 0:
                    dist.send(torch.ones(1), 1, tag=tag)
                else:
                    dist.recv(torch.ones(1), 0, tag=tag)

        threads = [threading.Thread(target=messages, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    trace = run(talk, world_size=2).trace
    assert len(trace) == 2 * 4 * 700
    assert (trace.matching.partner >= 0).all() and (trace.columns.over > 0).all()
    assert trace.ledger().total.rounds == 4 * 700


@settings(max_examples=12, deadline=None)
@given(
    messages=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(1, 2),
            st.sampled_from(["float32", "int64", "bool", "bfloat16"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_messages_are_counted_and_matched(messages):
    def talk():
        for source, step, dtype, shape in messages:
            target = (source + step) % 3
            tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
            if dist.get_rank() == source:
                dist.send(tensor, target)
            if dist.get_rank() == target:
                dist.recv(tensor, source)

    ledger = run(talk, world_size=3).trace.ledger()
    for rank in range(3):
        sent = [torch.zeros(shape, dtype=getattr(torch, dtype)).nbytes for source, _, dtype, shape in messages if source == rank]
        got = [
            torch.zeros(shape, dtype=getattr(torch, dtype)).nbytes for source, step, dtype, shape in messages if (source + step) % 3 == rank
        ]
        account = ledger.ranks[rank]
        assert (account.messages_out, account.bytes_out) == (len(sent), sum(sent))
        assert (account.messages_in, account.bytes_in) == (len(got), sum(got))
