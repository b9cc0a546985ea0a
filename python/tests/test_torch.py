"""torch.ops.winnow: schema, fake kernels, torch.compile, CUDA graphs."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

import winnow
from conftest import on
from winnow.torch import ops

INT = torch.int32


def bf16(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def e4m3(*shape, seed=0):
    """As bytes: opcheck compares its arguments with arithmetic that torch lacks for fp8."""
    return bf16(*shape, seed=seed).to(torch.float8_e4m3fn).view(torch.uint8)


def ints(*values):
    return torch.tensor(values, dtype=INT)


def filled(fmt, pages=3, page=8, seed=0):
    memory = torch.zeros(winnow.cache_shape(fmt, pages, page), dtype=torch.uint8)
    rows = bf16(pages * page, winnow.record_dim(fmt), seed=seed)
    winnow.write(rows, torch.arange(pages * page), winnow.Cache(memory, fmt, page))
    return memory


def arguments():
    """Name -> (args, kwargs) of one call of every operator."""
    table = torch.tensor([[2, 0], [1, -1]], dtype=INT)
    requests = ints(0, 1, 0)
    v32, v4, keys = filled("v32_fp8"), filled("v4_fp8"), filled("index_keys")
    indices = torch.randint(-1, 24, (3, 5), dtype=INT, generator=torch.Generator().manual_seed(1))
    scorer = {"keys": keys, "page": 8, "block_table": table, "requests": requests}
    turns = torch.rand(8, 2, 32)
    calls = {
        "norm": ((bf16(3, 64), torch.rand(64)), {"eps": 1e-5}),
        "rope_table_": ((torch.zeros(4, 2, 32),), {"theta": 160000.0}),
        "rotate": ((bf16(3, 2, 128), ints(0, 7, 9), turns), {"slice": "first", "pairs": "half"}),
        "rotate_e4m3": ((bf16(3, 2, 256), ints(0, 7, 9), turns), {"inverse": True}),
        "prepare_query": ((bf16(3, 2, 512), ints(0, 7, -1), turns), {"norm": "rms"}),
        "index_query": (
            (bf16(3, 4, 128), bf16(3, 4), ints(0, 7, 3), turns),
            {"factor": 0.5, "hadamard": True},
        ),
        "compress_": (
            (filled("v4_fp8").clone(), torch.rand(3, 4, 1024), torch.zeros(3, 512).bfloat16()),
            {
                "rows": torch.rand(3, 1024),
                "positions": ints(0, 1, 2),
                "page": 8,
                "requests": ints(0, 0, 0),
                "ratio": 2,
                "ring": True,
                "table": turns,
                "slots": torch.tensor([-1, 3, -1]),
            },
        ),
        "write_": ((v32.clone(), bf16(3, 576), torch.tensor([0, -1, 9]), "v32_fp8", 8), {}),
        "norm_write_": (
            (v32.clone(), keys.clone(), bf16(3, 64), torch.rand(64), bf16(3, 512)),
            {
                "slots": torch.tensor([0, -1, 9]),
                "format": "v32_fp8",
                "page": 8,
                "rope": bf16(3, 64, seed=1),
                "norm": "rms",
                "positions": ints(0, 7, 9),
                "table": turns,
                "index_kv": bf16(3, 128),
                "index_slots": torch.tensor([23, 1, -1]),
                "index_page": 8,
                "index_norm": "layer",
                "index_slice": "first",
            },
        ),
        "prepare_queries": (
            (bf16(3, 2, 512), bf16(3, 4, 128), bf16(3, 4), ints(0, 7, -1), turns),
            {"norm": "rms", "index_factor": 0.5, "index_pairs": "half"},
        ),
        "gather": ((v4, table, ints(10, 3), 13, "v4_fp8", 8), {"starts": ints(1, 0)}),
        "join": ((bf16(3, 4, 512), bf16(3, 4, 64)), {}),
        "quantize": ((bf16(3, 4),), {}),
        "score": ((e4m3(3, 4, 128), torch.rand(3, 4), ints(16, 8, 2)), {**scorer, "width": 16}),
        "score_select": ((e4m3(3, 4, 128), torch.rand(3, 4), ints(16, 8, 2), 3), scorer),
        "score_select_best": ((e4m3(3, 4, 128), torch.rand(3, 4), ints(16, 8, 2), 3, 2), scorer),
        "select": ((torch.rand(3, 9), 4), {"ends": ints(9, 2, 0)}),
        "select_best": ((torch.rand(3, 9), 4, 2), {"ends": ints(9, 2, 0), "block": 4}),
        "locate": ((indices, requests, table), {"page": 8, "pages": 3}),
        "attend": (
            (bf16(3, 2, 512), v4, indices, "v4_fp8", 8),
            {
                "scale": 0.07,
                "extra_cache": filled("v4_fp8", 2, 4),
                "extra_page": 4,
                "extra_indices": indices,
                "sink": torch.zeros(2),
            },
        ),
        "attend_mha": (
            (bf16(3, 2, 48), bf16(24, 2, 48), bf16(24, 2, 32)),
            {"ids": indices, "scale": 0.14},
        ),
        "topk_mask": ((indices, 24), {}),
        "merge": ((torch.rand(2, 3, 2, 16), torch.rand(2, 3, 2)), {"sink": torch.zeros(2)}),
        "compressed_slots": ((ints(3, 4, 7), requests, table), {"page": 8, "pages": 3}),
        "c128a_lists": (
            (ints(3, 4, 7), requests, table),
            {"width": 128, "ratio": 2, "page": 8, "pages": 3},
        ),
        "window_lists": ((ints(3, 4, 7), requests, table), {"window": 4, "page": 8, "pages": 3}),
        "combined_lists": (
            (torch.zeros(3, 2, dtype=INT), ints(3, 4, 7), ints(0, 1, 0), ints(9, 9), ints(9, 9)),
            {"compressed": 3, "rows": 12, "window": 4},
        ),
        "dequantize_weight": ((e4m3(130, 7), torch.rand(2, 1)), {}),
        "split_kv_b": ((bf16(32, 3, 24), 16), {}),
        "absorb_query": ((bf16(3, 2, 16), bf16(32, 2, 16)), {}),
        "project_output": ((bf16(3, 2, 32), bf16(32, 2, 24)), {}),
        "decompress": ((bf16(3, 48), bf16(32, 2, 16), bf16(32, 2, 24)), {}),
    }
    return calls


CALLS = arguments()


def test_every_operator_is_called():
    from winnow.torch.registration import library

    defined = {name.split("::")[1].split(".")[0] for name in library._op_defs}
    assert defined == set(CALLS)


def moved(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


# The stage whose kernels an operator runs, where that is not its own name.
STAGES = {"write_": "write", "norm_write_": "norm_write", "attend_mha": "mha", "topk_mask": "mask"}
STAGES |= {"select_best": "select", "score_select_best": "score_select"}
STAGES |= dict.fromkeys([n for n in CALLS if n.endswith(("_lists", "_slots"))], "lists")
STAGES |= dict.fromkeys(["split_kv_b", "absorb_query", "project_output", "decompress"], "absorb")


@pytest.mark.parametrize("name", sorted(CALLS))
@on(*{STAGES.get(name, name) for name in CALLS})
def test_opcheck(name, device):
    args, kwargs = arguments()[name]
    args = [moved(x, device) for x in args]
    kwargs = {k: moved(x, device) for k, x in kwargs.items()}
    torch.library.opcheck(getattr(ops, name), args, kwargs)


# Arguments that operators leave out: they make their results, and plan for themselves. Those that
# are requested come from an operator of their own, or are made always.
PLACES = {"out", "workspace", "plan", "part", "some_tokens", "kernel", "lengths", "counts", "lse"}
PLACES |= {"out_weights"}
PLACES |= {"k", "v", "w_uk", "w_uv", "scale", "scales", "e4m3", "clean"}
ASKED_FOR = {"attend": {"max_logit"}, "select": {"best", "best_blocks", "values"}}
ASKED_FOR["score_select"] = ASKED_FOR["select"]
# Operators of several calls: what the arguments of each begin with, but for those of all parts.
FUSED = {
    "norm_write_": {"x_": "norm", "": "write", "index_": "write"},
    "prepare_queries": {"": "prepare_query", "index_": "index_query"},
}
SHORTER = {"x_x": "x", "index_positions": "positions", "index_table": "table"}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_operators_have_the_arguments_of_the_calls(name):
    plain = name.rstrip("_").removesuffix("_e4m3").removesuffix("_best")
    there = {argument.name for argument in getattr(ops, name).default._schema.arguments}
    for prefix, call in FUSED.get(name, {"": plain}).items():
        signature = getattr(winnow, call).__nb_signature__[0][0]
        wanted = re.findall(r"[(,] \*?,? ?([a-z_0-9]+):", "( " + signature.split("(", 1)[1])
        names = {SHORTER.get(prefix + argument, prefix + argument) for argument in wanted}
        assert names - there <= {prefix + place for place in PLACES} | ASKED_FOR.get(call, set())


def test_best_blocks():
    """The two levels of V4.1's selection by operators: blocks, then ids within them."""
    logits = torch.rand(3, 40, generator=torch.Generator().manual_seed(2))
    ids, blocks = ops.select_best(logits, 4, 2, block=8)
    wanted_ids, wanted_blocks = winnow.select(logits, 4, block=8, best=2)
    assert torch.equal(ids, wanted_ids) and torch.equal(blocks, wanted_blocks)
    within = ops.select(logits, 4, within=blocks, block=8)
    assert torch.equal(within, winnow.select(logits, 4, within=blocks, block=8))
    assert ops.select_best(logits, 4, 0)[1].shape == (3, 0)


@pytest.mark.parametrize("name", ["rotate", "prepare_query", "index_query", "attend"])
def test_results_of_transposed_arguments(name):
    """Results are contiguous, as their fake ones say: what follows is compiled for that."""
    (x, *rest), kwargs = arguments()[name]
    x = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.library.opcheck(getattr(ops, name), (x, *rest), kwargs)


def test_meta_tensors():
    """One meta tensor among others is an error; a call of meta tensors alone has a meta result."""
    (q, cache, indices, *rest), kwargs = arguments()["attend"]
    with pytest.raises(ValueError, match="attend: cache: .* on cpu, .* found one on meta"):
        ops.attend(q, cache.to("meta"), indices, *rest, **kwargs)
    with pytest.raises(ValueError, match="attend: indices: .* found one on cpu"):
        ops.attend(q.to("meta"), cache.to("meta"), indices, *rest, **kwargs)
    for name, (args, kwargs) in arguments().items():
        args = [moved(x, "meta") for x in args]
        result = getattr(ops, name)(*args, **{k: moved(x, "meta") for k, x in kwargs.items()})
        for x in (
            () if result is None else (result,) if isinstance(result, torch.Tensor) else result
        ):
            assert x.device.type == "meta", name


class Wrapper(torch.Tensor):
    """A shape over other tensors, as DTensor is one."""

    @staticmethod
    def __new__(cls, inner, offset):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), offset, dtype=inner.dtype
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


class Watched(torch.Tensor):
    """Memory of its own, and operators of its own."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_memory():
    """Their data pointer is null, or as far from that as their offset: neither is read."""
    x, starts = torch.rand(6, 9), ints(0, 1)
    fake = FakeTensorMode()
    freed = x.clone()[3:]
    freed.untyped_storage().resize_(0)
    for tensor in (
        fake.from_tensor(x),
        fake.from_tensor(x)[3:],
        freed,
        torch._efficientzerotensor((6, 9)),
        Wrapper(x, 0),
        Wrapper(x, 27),
    ):
        with pytest.raises((ValueError, TypeError), match="^select: logits: expected an array"):
            winnow.select(tensor, 4)
    with pytest.raises(ValueError, match="^Cache: data: .* memory of its own, found a FakeTensor"):
        winnow.Cache(fake.from_tensor(bf16(8, 576))[1:], "v32_bf16")
    with pytest.raises(ValueError, match="^refill: query_starts: expected an array with memory of"):
        winnow.Plan(heads=4, pages=4).refill(fake.from_tensor(starts), [5])
    with fake, pytest.raises(ValueError, match="^select: out: expected an array with memory of"):
        winnow.select(x, 4)
    watched = torch.Tensor._make_subclass(Watched, x)
    assert torch.equal(winnow.select(watched, 4), winnow.select(x, 4))


def test_gradients_are_refused():
    """An input whose gradient would be lost raises in grad mode, and passes outside it."""
    (q, cache, indices, *_), _ = arguments()["attend"]
    memory = winnow.Cache(cache, "v4_fp8", 8)
    want = winnow.attend(q, memory, indices, scale=0.1)
    kv = bf16(24, 512)
    calls = {
        "q": lambda: winnow.attend(torch.nn.Parameter(q), memory, indices, scale=0.1),
        "cache": lambda: winnow.attend(
            q, winnow.Cache(torch.nn.Parameter(kv), "v4_bf16"), indices, scale=0.1
        ),
        "sink": lambda: winnow.attend(
            q, memory, indices, scale=0.1, sink=torch.zeros(2, requires_grad=True)
        ),
        "out": lambda: winnow.attend(
            q, memory, indices, scale=0.1, out=torch.zeros_like(want, requires_grad=True)
        ),
        "operator": lambda: ops.attend(
            torch.nn.Parameter(q), cache, indices, "v4_fp8", 8, scale=0.1
        ),
    }
    for name, call in calls.items():
        name = "q" if name == "operator" else name
        with pytest.raises(NotImplementedError, match=f"attend: {name}: .* torch.no_grad"):
            call()
        with torch.no_grad():
            without = call()
        with torch.inference_mode():
            inference = call()
        for got in (without, inference):
            got = got[0] if isinstance(got, tuple) else got
            assert got.shape == want.shape
    # A tensor that requires no gradient passes in grad mode; so do Parameters that are frozen.
    assert torch.equal(
        winnow.attend(torch.nn.Parameter(q, False), memory, indices, scale=0.1), want
    )


def test_results_do_not_depend_on_the_default_dtype():
    for name in sorted(CALLS):
        torch.manual_seed(0)
        args, kwargs = arguments()[name]
        want = getattr(ops, name)(*args, **kwargs)
        torch.set_default_dtype(torch.bfloat16)
        try:
            got = getattr(ops, name)(*args, **kwargs)
        finally:
            torch.set_default_dtype(torch.float32)
        if isinstance(want, torch.Tensor):
            want, got = (want,), (got,)
        for a, b in zip(want or (), got or (), strict=True):
            assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (
                name
            )


@pytest.mark.filterwarnings("ignore")
def test_gradients_are_refused_in_graphs():
    """A compiled or exported call refuses what the call itself does, and serves what it does."""
    x = bf16(3, 64).requires_grad_()

    def loss(x):
        return ops.norm(x * 2).float().sum() + x.float().sum()

    def beside(x):
        with torch.no_grad():
            normed = ops.norm(x * 2)
        return normed.float().sum() + x.float().sum()

    text = "norm: x: .* torch.no_grad"
    for fullgraph in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=fullgraph, backend="aot_eager")
        # With fullgraph it is torch's error, which has ours in its text.
        with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported), match=text):
            compiled(x)
        with torch.no_grad():
            assert torch.equal(compiled(x), loss(x))
        compiled = torch.compile(beside, fullgraph=fullgraph, backend="aot_eager")
        compiled(x).backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        x.grad = None
    with pytest.raises(NotImplementedError, match=text):
        ops.norm(x.detach().to("meta").requires_grad_())


def layer(q, memory, kv, slots, indices):
    ops.write_(memory, kv, slots, "v32_fp8", 8)
    out, lse = ops.attend(q, memory, indices, "v32_fp8", 8, scale=0.07)
    return out.float().sum(-1) + lse


def layer_inputs(device):
    indices = torch.randint(-1, 24, (3, 5), dtype=INT, generator=torch.Generator().manual_seed(1))
    inputs = (
        bf16(3, 2, 576),
        filled("v32_fp8"),
        bf16(3, 576, seed=5),
        torch.tensor([4, 9, 23]),
        indices,
    )
    return [x.to(device) for x in inputs]


@on("attend", "write")
@pytest.mark.filterwarnings("ignore")
def test_compile(device):
    want = layer(*layer_inputs(device))
    inputs = layer_inputs(device)
    before = inputs[1].clone()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), want, rtol=0, atol=0)
    assert not torch.equal(inputs[1], before), "the write is part of the graph"


@on("select")
def test_compile_with_dynamic_shapes(device):
    """A second batch size compiles to symbolic shapes; no third compilation."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, n: ops.select(x, n), fullgraph=True, backend=counter)
    for rows in (2, 5, 7, 11):
        x = torch.rand(rows, 30, device=device)
        assert torch.equal(compiled(x, 3), winnow.select(x, 3))
    assert counter.frame_count <= 2
