"""What only CUDA tensors have: streams, graphs, addresses on a device, compiled graphs."""

import numpy as np
import pytest
import torch

import winnow
from conftest import devices_of
from test_torch import layer, layer_inputs
from winnow.torch import ops

INT = torch.int32
pytestmark = [pytest.mark.usefixtures("device"), *devices_of("attend")[1].marks]


@pytest.fixture
def device():
    return "cuda"


def test_no_copies(small):
    """Results stand where the caller says, in its strides; arguments are read where they are."""
    q, cache, indices = small
    want, want_lse = winnow.attend(q, cache, indices, lse=True, scale=0.05)
    assert want.device == q.device and want_lse.device == q.device
    out = torch.zeros(2, 9, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(8, 2, device="cuda")
    got = winnow.attend(q, cache, indices, out=out[:, :8], lse=lse.t(), scale=0.05)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    assert torch.equal(out[:, :8], want) and not out[:, 8].any()
    assert torch.equal(lse.t(), want_lse)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    winnow.attend(q, cache, indices, out=out[:, :8], lse=lse.t(), scale=0.05)
    assert torch.cuda.memory_allocated() == before


def test_strides(small):
    """Heads and tokens apart, rows of indices apart."""
    q, cache, indices = small
    want = winnow.attend(q, cache, indices, scale=0.05)
    apart = torch.zeros(8, 5, 576, dtype=torch.bfloat16, device="cuda")
    view = apart.transpose(0, 1)[1:4:2]  # [2, 8, 576], token stride below the head stride
    view.copy_(q)
    wide = torch.full((2, 40), 7, dtype=INT, device="cuda")
    wide[:, 4:16] = indices
    assert torch.equal(winnow.attend(view, cache, wide[:, 4:16], scale=0.05), want)


def test_devices_must_agree(small):
    q, cache, indices = small
    with pytest.raises(ValueError, match="expected an array on cuda:0.*, found one on cpu"):
        winnow.attend(q, cache, indices.cpu(), scale=0.05)
    plan = winnow.Plan(heads=8, topk=12, page=16, pages=4, max_tokens=2)
    with pytest.raises(ValueError, match="plan: expected a plan for cuda:0, found one for cpu"):
        winnow.attend(q, cache, indices, plan=plan, scale=0.05)


def test_arrays_of_other_libraries(small):
    """CuPy's and JAX's arrays on the device, and a tensor's memory under another name."""
    cupy = pytest.importorskip("cupy")
    q, cache, indices = small
    want = winnow.attend(q, cache, indices, scale=0.05)
    theirs = cupy.from_dlpack(indices)
    assert theirs.data.ptr == indices.data_ptr()
    assert torch.equal(winnow.attend(q, cache, theirs, scale=0.05), want)
    out = cupy.zeros((2, 6), cupy.int32)
    logits = cupy.asarray(np.random.default_rng(0).random((2, 30), dtype=np.float32))
    assert winnow.select(logits, 6, out=out) is out
    assert np.array_equal(cupy.asnumpy(out), winnow.select(cupy.asnumpy(logits), 6))


def late(stream):
    """Keeps a stream busy for some ten milliseconds, so that what does not wait for it is early."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)


@pytest.mark.parametrize("planned", [False, True])
def test_current_stream(small, planned):
    """Calls are queued on the stream that is current, behind what is there, plan or not."""
    q, cache, indices = small
    changed = q * 2
    extra = {}
    if planned:
        plan = winnow.Plan(heads=8, topk=12, page=16, pages=4, max_tokens=2, device="cuda")
        plan.refill([0, 1, 2], [60, 61])
        extra = {"plan": plan}
    want = winnow.attend(changed, cache, indices, scale=0.05, **extra)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    late(stream)
    with torch.cuda.stream(stream):
        q.copy_(changed)
        got = winnow.attend(q, cache, indices, scale=0.05, **extra)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)


def test_pipeline_on_the_current_stream_and_in_a_graph():
    """One decode through all stages: on a side stream, then captured and replayed."""
    g = torch.Generator().manual_seed(2)
    pages, page, heads, tokens = 4, 16, 4, 2
    plan = winnow.Plan(
        heads=heads, topk=16, index_heads=2, page=page, pages=pages, max_tokens=4, device="cuda"
    )
    plan.refill([0, 1, 2], [20, 31])

    def empty(fmt):
        memory = torch.zeros(winnow.cache_shape(fmt, pages, page), dtype=torch.uint8)
        return winnow.Cache(memory.cuda(), fmt, page)

    cache, keys = empty("v32_fp8"), empty("index_keys")
    every = torch.arange(pages * page).cuda()
    winnow.write(torch.randn(pages * page, 576, generator=g).bfloat16().cuda(), every, cache)
    winnow.write(torch.randn(pages * page, 128, generator=g).bfloat16().cuda(), every, keys)
    table = torch.tensor([[2, 0], [1, 3]], dtype=INT).cuda()
    slots = torch.tensor([3, 62]).cuda()
    q = torch.randn(tokens, heads, 576, generator=g).bfloat16().cuda()
    arguments = {
        "kv": torch.randn(tokens, 576, generator=g).bfloat16().cuda(),
        "slots": slots,
        "cache": cache,
        "block_table": table,
        "index_k": torch.randn(tokens, 128, generator=g).bfloat16().cuda(),
        "index_slots": slots,
        "index_keys": keys,
        "index_table": table,
        "index_q": torch.randn(tokens, 2, 128, generator=g).to(torch.float8_e4m3fn).cuda(),
        "index_weights": torch.rand(tokens, 2, generator=g).cuda(),
        "scale": 0.05,
    }
    first = winnow.pipeline(plan, q, **arguments)
    second = winnow.pipeline(plan, q * 2, **arguments)
    assert not torch.equal(first, second)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    x = q.clone()
    late(stream)
    with torch.cuda.stream(stream):
        x.mul_(2)
        got = winnow.pipeline(plan, x, **arguments)
    plan.refill([0, 1, 2], [2, 3])  # waits for the copy that is queued
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, second)
    plan.refill([0, 1, 2], [20, 31])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = winnow.pipeline(plan, x, **arguments)
    x.copy_(q)
    graph.replay()
    assert torch.equal(got, first)


def test_scratch_is_kept():
    """The largest workspace of score_select is allocated once, not by every call."""
    tokens, keys = 512, 131072  # 256 MB of logits
    q = torch.ones(tokens, 1, 128, device="cuda").to(torch.float8_e4m3fn)
    rows = torch.ones(keys, 128, device="cuda").to(torch.float8_e4m3fn)
    weights, scales = torch.ones(tokens, 1, device="cuda"), torch.rand(keys, device="cuda")
    ends = torch.full((tokens,), keys, dtype=INT, device="cuda")
    out = torch.empty(tokens, 9, dtype=INT, device="cuda")

    def allocations_of_a_call():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        winnow.score_select(q, weights, ends, 9, key_rows=rows, key_scales=scales, out=out)
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    assert allocations_of_a_call() <= 1
    assert allocations_of_a_call() == 0


def test_graph():
    """Operators captured and replayed over other contents."""
    inputs = layer_inputs("cuda")
    want = layer(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer(*inputs)
    inputs[0].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(got, layer(*inputs), rtol=0, atol=0)
    assert not torch.equal(got, want)


def test_graph_of_every_verb(small):
    """The module's functions, not only the operators: results and scratch come from the pool."""
    q, cache, indices = small
    keys, scales = torch.randn(50, 128).to(torch.float8_e4m3fn).cuda(), torch.rand(50).cuda()
    index_q = torch.randn(2, 4, 128).to(torch.float8_e4m3fn).cuda()
    weights = torch.rand(2, 4).cuda()
    ends = torch.tensor([50, 31], dtype=INT).cuda()
    table = torch.tensor([[2, 0, 1, 3]], dtype=INT).cuda()
    requests = torch.zeros(2, dtype=INT).cuda()

    def step():
        ids = winnow.score_select(index_q, weights, ends, 12, key_rows=keys, key_scales=scales)
        slots = winnow.locate(ids, requests, table, page=16, pages=4)
        return ids, winnow.attend(q, cache, slots, scale=0.05)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    q.mul_(0.5)
    weights.neg_()
    graph.replay()
    for a, b in zip(got, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["cudagraphs", "inductor"])
def test_compiled(backend):
    """torch.compile down to graphs and generated code, with the operators between its own."""

    def scaled(q, memory, indices):
        out, lse = ops.attend(q * 0.5, memory, indices, "v32_fp8", 8, scale=0.05)
        return out.float().sum(-1) + lse

    q, memory, _, _, indices = layer_inputs("cuda")
    compiled = torch.compile(scaled, fullgraph=True, backend=backend)
    for factor in (1, 3, -2):  # warm-up, capture, replay
        x = q * factor
        want = scaled(x, memory, indices)
        torch.testing.assert_close(compiled(x, memory, indices), want, rtol=1e-5, atol=1e-4)
