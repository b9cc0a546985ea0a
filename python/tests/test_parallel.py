"""Ranks as processes over gloo: cut and combine against one process, a plan over heads, over the
context and over queries, and faults of one rank, which every other rank must name in time. Where
there is CUDA, a plan over gloo has the bits of threads there as well."""

import ctypes
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

import winnow  # noqa: E402
from winnow.parallel import Communicator, _DeviceMemory  # noqa: E402

TOKENS, TOPK, HEADS, PAGE, CONTEXT = 5, 32, 8, 8, 150
DEADLINE = 3.0
# Where nobody is missing, a machine with other work may take its time.
PATIENCE = 100.0


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def owned(rank, world, interleave, count):
    positions = torch.arange(count)
    return positions[(positions // interleave) % world == rank]


def plan_of(comm, interleave, tokens=TOKENS, length=400):
    """Whose ranks have agreed on a batch of decodes."""
    plan = winnow.Plan(
        heads=HEADS,
        topk=TOPK,
        page=PAGE,
        pages=tokens * (length // PAGE + 2),
        max_context=length,
        max_requests=tokens,
        max_tokens=tokens,
        comm=comm,
        spread="context",
        interleave=interleave,
    )
    plan.refill(list(range(tokens + 1)), [length] * tokens)
    return plan


def check_cut(comm, world):
    logits = (numbers(1, TOKENS, 400) * 2).round()  # ties
    want = winnow.select(logits, TOPK)
    for interleave in (1, 7):
        mine = owned(comm.rank, world, interleave, 400)
        part = logits[:, mine].contiguous()
        ids, values = winnow.select(part, TOPK, values=True)
        assert torch.equal(values[ids >= 0], part.gather(1, ids.clamp(min=0).long())[ids >= 0])
        for form in ("auto", "gather", "owner"):
            kept, counts, positions = winnow.cut(
                ids,
                values,
                comm=comm,
                interleave=interleave,
                form=form,
                counts=True,
                positions=True,
            )
            assert torch.equal(positions, want)
            for t in range(TOKENS):
                mine_of_row = [p for p in want[t].tolist() if p >= 0 and p in set(mine.tolist())]
                assert mine[kept[t, : counts[t]].long()].tolist() == mine_of_row
        plan = plan_of(comm, interleave)
        asked = dict(counts=True, positions=True)
        again = winnow.cut(ids, values, plan=plan, **asked)
        assert all(map(torch.equal, again, (kept, counts, positions)))
        for other, name in (dict(comm=comm), "comm"), (dict(interleave=7), "interleave"):
            with pytest.raises(ValueError, match=f"cut: {name}: expected no.* with a plan"):
                winnow.cut(ids, values, plan=plan, **other)
        with pytest.raises(ValueError, match=f"cut: plan: .* {TOKENS - 1} tokens"):
            winnow.cut(ids[1:], values[1:], plan=plan)


def check_combine(comm, world):
    outs, lses = numbers(2, world, TOKENS, HEADS, 512), numbers(3, world, TOKENS, HEADS)
    sink = numbers(4, HEADS)
    own = HEADS // world
    mine = slice(comm.rank * own, (comm.rank + 1) * own)
    out, lse = winnow.combine(
        outs[comm.rank], lses[comm.rank], comm=comm, sink=sink[mine].contiguous(), lse=True
    )
    want, want_lse = winnow.merge(
        outs[:, :, mine].contiguous(),
        lses[:, :, mine].contiguous(),
        sink=sink[mine].contiguous(),
        lse=True,
    )
    assert torch.equal(out, want) and torch.equal(lse, want_lse)  # bit for bit
    again = winnow.combine(
        outs[comm.rank],
        lses[comm.rank],
        sink=sink[mine].contiguous(),
        lse=True,
        plan=plan_of(comm, 1),
    )
    assert torch.equal(again[0], want) and torch.equal(again[1], want_lse)
    with pytest.raises(ValueError, match="combine: wire: expected nothing with a plan"):
        winnow.combine(outs[comm.rank], lses[comm.rank], wire="f32", plan=plan_of(comm, 1))


class Threads:
    """Ranks as threads of this process: the transport with nothing between them."""

    class Rank:
        name = "threads"

        def __init__(self, group, rank):
            self.group, self.rank, self.size = group, rank, group.size
            self.takes_cuda = group.cuda

        def _copy(self, to, source, nbytes):
            if not self.takes_cuda:
                ctypes.memmove(to, source, nbytes)
            elif nbytes > 0:
                theirs, own = (
                    torch.as_tensor(_DeviceMemory(at, nbytes), device="cuda") for at in (source, to)
                )
                own.copy_(theirs)
                torch.cuda.synchronize()

        def _meet(self, send, recv, nbytes, block, copy):
            group = self.group
            if self.takes_cuda:
                torch.cuda.synchronize()
            group.sent[self.rank] = send
            group.barrier.wait()
            for r in range(self.size):
                copy(recv + r * nbytes, group.sent[r] + block * nbytes, nbytes)
            group.barrier.wait()

        def all_gather(self, send, recv, nbytes):
            self._meet(send, recv, nbytes, 0, self._copy)

        def all_to_all(self, send, recv, nbytes):
            self._meet(send, recv, nbytes, self.rank, self._copy)

        def exchange(self, send, recv, nbytes):
            self._meet(send, recv, nbytes, 0, ctypes.memmove)

    def __init__(self, size, cuda=False):
        self.size, self.sent, self.cuda = size, [0] * size, cuda
        self.barrier = threading.Barrier(size, timeout=60)

    def run(self, body):
        """body(communicator) on every rank; what each returned."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda r: body(Threads.Rank(self, r)), range(self.size)))


class Layer:
    """One layer's step of two requests, on one rank or on several."""

    def __init__(
        self, comm=None, spread="none", interleave=4, new=(1, 1), sharded=False, device="cpu"
    ):
        self.device = device
        world, rank = (comm.size, comm.rank) if comm else (1, 0)
        held = spread == "context" or sharded
        self.heads = HEADS // world if spread == "heads" else HEADS
        first = rank * self.heads if spread == "heads" else 0
        self.mine = slice(first, first + self.heads)
        pages = 2 * (CONTEXT // PAGE + 2)
        self.plan = winnow.Plan(
            heads=self.heads,
            topk=TOPK,
            index_heads=2,
            page=PAGE,
            pages=pages,
            max_context=CONTEXT,
            max_requests=4,
            max_tokens=64,
            workspace_rows=2 * CONTEXT if sharded else 0,
            split="fixed",
            kernel="simd" if device == "cpu" else None,
            device=device,
            comm=comm,
            spread=spread,
            interleave=interleave,
            sharded=sharded,
        )
        table = torch.arange(pages, dtype=torch.int32).view(2, -1)
        self.table = table.to(device)

        def empty(fmt):
            memory = torch.zeros(winnow.cache_shape(fmt, pages, PAGE), dtype=torch.uint8)
            return winnow.Cache(memory.to(device), fmt, PAGE)

        self.cache, self.keys = empty("v32_fp8"), empty("index_keys")
        self.lens = [CONTEXT, max(3, new[1])]
        self.starts = [0, new[0], new[0] + new[1]]
        by_queries = spread == "queries"
        shard = dict(world=world, rank=rank, interleave=interleave) if by_queries else {}
        self.tokens = winnow.shard_batch(
            self.starts, self.lens, **(shard or dict(world=1, rank=0))
        )[2]

        def slots(request, positions):
            if not held:
                local = positions
                mine = torch.ones_like(positions, dtype=torch.bool)
            else:
                mine = (positions // interleave) % world == rank
                local = positions // (world * interleave) * interleave + positions % interleave
            found = table[request][local // PAGE].long() * PAGE + local % PAGE
            return torch.where(mine, found, -1).to(device)

        fresh = []
        for r, length in enumerate(self.lens):
            where = slots(r, torch.arange(length))
            kv = (0.2 * numbers(10 + r, length, 576)).bfloat16().to(device)
            k = numbers(20 + r, length, 128).bfloat16().to(device)
            old = length - new[r]
            winnow.write(kv[:old], where[:old], self.cache)
            winnow.write(k[:old], where[:old], self.keys)
            fresh.append((kv[old:], k[old:], where[old:]))
        self.kv, self.k, self.slots = (torch.cat(x) for x in zip(*fresh, strict=True))

    def run(self, ahead=False, refill=True):
        if refill:
            self.plan.refill(self.starts, self.lens)
        own, count = torch.tensor(self.tokens, dtype=torch.long), self.starts[-1]
        here = own.to(self.device)
        assert self.plan.batch_tokens == count and self.plan.tokens == len(own)
        prefix = None
        if ahead:
            prefix = winnow.gather_prefix(self.plan, self.cache, self.table, self.keys, self.table)
        return winnow.pipeline(
            self.plan,
            numbers(30, count, HEADS, 576).bfloat16()[own][:, self.mine].to(self.device),
            self.kv[here],
            self.slots,
            self.cache,
            self.table,
            scale=0.06,
            index_k=self.k[here],
            index_slots=self.slots,
            index_keys=self.keys,
            index_table=self.table,
            index_q=numbers(31, count, 2, 128)[own].to(torch.float8_e4m3fn).to(self.device),
            index_weights=numbers(32, count, 2)[own].to(self.device),
            prefix=prefix,
        )


def check_layers(comm, world):
    whole = Layer().run()
    own = HEADS // world
    mine = whole[:, comm.rank * own : (comm.rank + 1) * own]
    assert torch.equal(Layer(comm, "heads").run(), mine)
    shared = Layer(comm, "context").run()
    assert shared.shape == mine.shape
    torch.testing.assert_close(shared.float(), mine.float(), rtol=2**-7, atol=1e-6)
    assert (shared == mine).float().mean() > 0.99
    # One set of bits, whatever lies between the ranks.
    threads = Threads(world).run(lambda other: Layer(other, "context").run())
    assert torch.equal(shared, threads[comm.rank])
    # Queries: a prefill behind a prefix, and a sequence with fewer tokens than ranks.
    for new in ((20, 3), (1, 1)):
        whole = Layer(new=new).run()
        for sharded in (False, True):
            layer = Layer(comm, "queries", new=new, sharded=sharded)
            assert torch.equal(layer.run(), whole[layer.tokens])
        layer = Layer(comm, "queries", new=new, sharded=True)
        assert torch.equal(layer.run(ahead=True), whole[layer.tokens])


# Over gloo, which takes CUDA's tensors, the bits of threads with a stream each.
def check_cuda(comm, world):
    comm = Communicator(deadline=DEADLINE, device="cuda")

    def over(other, *args, **kwargs):
        with torch.cuda.stream(torch.cuda.Stream()):
            out = Layer(other, *args, device="cuda", **kwargs).run()
            torch.cuda.current_stream().synchronize()
        return out.cpu()

    for spread, new, sharded in (
        ("heads", (1, 1), False),
        ("context", (1, 1), False),
        ("queries", (20, 3), False),
        ("queries", (20, 3), True),
    ):
        way = dict(spread=spread, new=new, sharded=sharded)
        threads = Threads(world, cuda=True).run(lambda other, way=way: over(other, **way))
        assert torch.equal(over(comm, **way), threads[comm.rank]), way
    whole, layer = over(None, new=(20, 3)), Layer(comm, "queries", new=(20, 3), device="cuda")
    assert torch.equal(layer.run().cpu(), whole[layer.tokens])


def expect_error(body, *words):
    began = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        body()
    assert time.monotonic() - began < DEADLINE + 1
    for word in words:
        assert word in str(caught.value), str(caught.value)


def check_options(comm, world):
    plan = dict(heads=2 * world, pages=8, comm=comm, spread="context")
    expect_error(lambda: winnow.Plan(**plan, topk=64 if comm.rank == 1 else 32), "topk", "rank 1")
    expect_error(lambda: winnow.Plan(**plan, page=0 if comm.rank == 1 else 64), "page")
    kernel = "reference" if comm.rank == 1 else "simd"
    expect_error(lambda: winnow.Plan(**plan, kernel=kernel), "write=simd", "reference on rank 1")
    shapes = torch.zeros(3 + (comm.rank == 1), 4, dtype=torch.int32)
    expect_error(
        lambda: winnow.cut(shapes, shapes.float(), comm=comm, interleave=1), "cut: ids", "rank 1"
    )
    same = winnow.Plan(**plan)
    lens = [9] if comm.rank == 1 else [8]
    expect_error(lambda: same.refill([0, 1], lens), "refill", "rank 1")
    starts = [0, 2] if comm.rank == 1 else [0, 1]
    expect_error(lambda: same.refill(starts, [8]), "2 on rank 1")
    same.refill([0, 1], [8])  # all may go on


def check_late(comm, world):
    if comm.rank == 1:
        time.sleep(DEADLINE + 2)
        return
    expect_error(lambda: winnow.Plan(pages=8, comm=comm, spread="heads"), "no answer from rank 1")
    # Spent: the next call does not wait.
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        winnow.Plan(pages=8, comm=comm, spread="heads")
    assert time.monotonic() - began < DEADLINE + 2


def check_killed(comm, world):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_error(lambda: winnow.Plan(pages=8, comm=comm, spread="heads"), "rank 1")


def check_lost(comm, world):
    layer = Layer(comm, "context")
    layer.plan.refill(layer.starts, layer.lens)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # The ranks have agreed: it is missing in the collective itself. gloo sees its connection close.
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="cut: gloo"):
        layer.run(refill=False)
    assert time.monotonic() - began < DEADLINE + 1


def member(rank, world, port, check, deadline, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WINNOW_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        check(Communicator(deadline=deadline), world)
        results.put((rank, ""))
    except BaseException as e:  # noqa: BLE001  # what a rank says goes to the test, whatever it is
        results.put((rank, f"{type(e).__name__}: {e}"))
    results.close()
    results.join_thread()
    os._exit(0)  # without waiting for ranks that a fault has taken


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(check, world, living=None, deadline=DEADLINE):
    context = mp.get_context("spawn")
    results, port = context.Queue(), free_port()
    ranks = [
        context.Process(target=member, args=(r, world, port, check, deadline, results))
        for r in range(world)
    ]
    for p in ranks:
        p.start()
    said = {}
    for _ in range(living or world):
        rank, text = results.get(timeout=240)
        said[rank] = text
    for p in ranks:
        p.join(20)
        if p.is_alive():
            p.kill()
    assert not any(said.values()), said


# Starting a process takes longer than what it then does: one start serves several checks.
def check_results(comm, world):
    check_cut(comm, world)
    check_combine(comm, world)
    check_layers(comm, world)


def check_faults(comm, world):
    check_options(comm, world)
    check_killed(comm, world)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world):
    run(check_results, world, deadline=PATIENCE)


@pytest.mark.skipif(
    not any(k.device == "cuda" and k.available for k in winnow.support()), reason="no CUDA kernels"
)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_on_cuda(world):
    run(check_cuda, world, deadline=PATIENCE)


def test_ranks_that_differ_and_one_that_dies():
    run(check_faults, 3, living=2)


def test_a_rank_lost_in_a_collective():
    run(check_lost, 4, living=3)


def test_a_late_rank():
    run(check_late, 3)
