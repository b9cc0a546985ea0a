"""winnow.torch's layers and caches: requests, pages, mixed batches."""

import pytest
import torch

from conftest import on
from winnow.torch import LayerCaches, MlaConfig, MlaLayer, Rope, V4Config, V4Layer

PLAIN = Rope(10000.0)
MLA = MlaConfig(
    hidden=64,
    heads=4,
    q_lora=48,
    nope=128,
    value=128,
    index_heads=4,
    topk=4096,  # above every context here: what is chosen does not depend on rounding
    scale=192**-0.5,
    rope=PLAIN,
)
V4 = V4Config(
    hidden=64,
    heads=4,
    q_lora=48,
    ratio=0,
    window=128,
    groups=2,
    rank=32,
    rope=PLAIN,
    index_heads=4,
    topk=4096,
)


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mla_weights(config, prefix=""):
    c, d = config, config.hidden
    shapes = {
        "q_a_proj.weight": (c.q_lora, d),
        "q_a_layernorm.weight": (c.q_lora,),
        "q_b_proj.weight": (c.heads * (c.nope + 64), c.q_lora),
        "kv_a_proj_with_mqa.weight": (576, d),
        "kv_a_layernorm.weight": (512,),
        "kv_b_proj.weight": (c.heads * (c.nope + c.value), 512),
        "o_proj.weight": (d, c.heads * c.value),
        "indexer.wq_b.weight": (128 * c.index_heads, c.q_lora),
        "indexer.wk.weight": (128, d),
        "indexer.k_norm.weight": (128,),
        "indexer.k_norm.bias": (128,),
        "indexer.weights_proj.weight": (c.index_heads, d),
    }
    return drawn(shapes, prefix)


def window_shapes(c):
    """What every layer of V4 and V4.1 has, by the checkpoint's names."""
    d = c.hidden
    return {
        "wq_a.weight": (c.q_lora, d),
        "q_norm.weight": (c.q_lora,),
        "wq_b.weight": (c.heads * 512, c.q_lora),
        "wkv.weight": (512, d),
        "kv_norm.weight": (512,),
        "attn_sink": (c.heads,),
        "wo_a.weight": (c.groups * c.rank, c.heads * 512 // c.groups),
        "wo_b.weight": (d, c.groups * c.rank),
    }


def v4_weights(config, prefix=""):
    c, d, e = config, config.hidden, 2 if config.ratio == 4 else 1
    shapes = window_shapes(c)
    parts = {0: [], 4: [("compressor", 512), ("indexer.compressor", 128)]}
    for name, dim in parts.get(c.ratio, [("compressor", 512)]):
        shapes |= {
            f"{name}.wkv.weight": (e * dim, d),
            f"{name}.wgate.weight": (e * dim, d),
            f"{name}.ape": (c.ratio, e * dim),
            f"{name}.norm.weight": (dim,),
        }
    if c.ratio == 4:
        shapes["indexer.wq_b.weight"] = (128 * c.index_heads, c.q_lora)
        shapes["indexer.weights_proj.weight"] = (c.index_heads, d)
    return drawn(shapes, prefix)


def drawn(shapes, prefix):
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        if "norm" in name:
            tensors[prefix + name] = 1 + 0.2 * random(*shape, seed=seed)
        elif len(shape) == 1 or name.endswith("ape"):
            tensors[prefix + name] = random(*shape, seed=seed)
        else:
            draw = random(*shape, seed=seed, scale=shape[-1] ** -0.5)
            tensors[prefix + name] = draw.bfloat16()
    return tensors


def v4_config(ratio):
    rope = Rope(160000.0, 16.0, 65536) if ratio else PLAIN
    return V4Config(**{**V4.__dict__, "ratio": ratio, "rope": rope})


def layer_of(kind, device="cpu"):
    if kind == "mla":
        return MlaLayer(MLA, mla_weights(MLA), device=device)
    config = v4_config(int(kind.removeprefix("v4-")))
    return V4Layer(config, v4_weights(config), device=device)


KINDS = ["mla", "v4-0", "v4-4", "v4-128"]


def run(caches, layer, x, parts, accepted=None):
    """One step over rows [a, b) of each request's x; returns its rows of y."""
    step = caches.begin([(request, b - a) for request, a, b in parts])
    y = layer(torch.cat([x[request][a:b] for request, a, b in parts]), step)
    caches.commit(step, accepted)
    return y.split([b - a for _, a, b in parts])


def close(got, want):
    """Sums of projections differ in their order with the number of rows, and fp8 follows."""
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error < 2.0**-4, f"{error:.3g} of the largest value"


@on("attend", "compress", "write", "absorb")
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batches(kind, device):
    """Chunks, decodes and rejected drafts of two requests give what one pass over each gives."""
    layer = layer_of(kind, device)
    x = [random(300, 64, seed=s).bfloat16().to(device) for s in (1, 2)]
    caches = LayerCaches([layer], page=16)
    assert [caches.add(), caches.add()] == [0, 1]
    whole = [run(caches, layer, x, [(r, 0, 300)])[0] for r in (0, 1)]
    for request in (0, 1):
        caches.free(request)
    assert {caches.add(), caches.add()} == {0, 1}
    got = [torch.empty_like(whole[0]) for _ in range(2)]
    wrong = [torch.randn_like(rows) for rows in x]
    for parts in (
        [(0, 0, 130)],
        [(0, 130, 131), (1, 0, 257)],
        [(1, 257, 258), (0, 131, 250)],
        [(0, 250, 251), (1, 258, 260)],
    ):
        for (r, a, b), y in zip(parts, run(caches, layer, x, parts), strict=True):
            got[r][a:b] = y
    # A sure token and four drafts that are all rejected, across a C4A and the C128A boundary.
    drafts = [x[0].clone(), x[1]]
    drafts[0][252:256] = wrong[0][252:256]
    y = run(caches, layer, drafts, [(0, 251, 256), (1, 260, 261)], {0: 1})
    got[0][251:252], got[1][260:261] = y[0][:1], y[1]
    assert caches.length(0) == 252 and caches.length(1) == 261
    for parts in ([(1, 261, 300), (0, 252, 253)], [(0, 253, 300)]):
        for (r, a, b), y in zip(parts, run(caches, layer, x, parts), strict=True):
            got[r][a:b] = y
    for r in (0, 1):
        close(got[r], whole[r])


@pytest.mark.parametrize("kind", KINDS)
def test_copies(kind):
    """A copied prefix goes on as its source would have, and neither disturbs the other."""
    layer = layer_of(kind)
    a, b = (random(200, 64, seed=s).bfloat16() for s in (1, 2))
    b[:150] = a[:150]
    caches = LayerCaches([layer], page=16)
    want = []
    for rows in (a, b):
        request = caches.add()
        want.append(run(caches, layer, {request: rows}, [(request, 0, 200)])[0])
    first = caches.add()
    run(caches, layer, {first: a}, [(first, 0, 150)])
    before = caches.used_bytes()
    second = caches.copy(first)
    pages_of_copy = caches.used_bytes() - before
    x = {first: a, second: b}
    y = run(caches, layer, x, [(second, 150, 151), (first, 150, 200)])
    close(y[1], want[0][150:])
    close(y[0], want[1][150:151])
    close(run(caches, layer, x, [(second, 151, 200)])[0], want[1][151:])
    # The copy shared its pages: what it took was its states.
    states = sum(4 * s[1][0].numel() for s in caches._states.values())
    assert pages_of_copy == states
    for request in list(caches.requests):
        caches.free(request)
    assert caches.used_bytes() == 0
    assert all(set(p.holders) == {0} for p in caches.pages.values())


def test_prefix_of_a_copy():
    """MLA keeps its whole past: a request may be resumed anywhere, and shared pages are copied."""
    layer = layer_of("mla")
    a = random(200, 64, seed=1).bfloat16()
    caches = LayerCaches([layer], page=16)
    first = caches.add()
    want = run(caches, layer, {first: a}, [(first, 0, 200)])[0]
    second = caches.copy(first, 70)
    # The first request goes back into pages that it shares, and stores something else there.
    caches.truncate(first, 65)
    run(caches, layer, {first: a.flip(0)}, [(first, 65, 100)])
    close(run(caches, layer, {second: a}, [(second, 70, 200)])[0], want[70:])


def test_window_pages_are_released():
    layer = layer_of("v4-0")
    caches = LayerCaches([layer], page=16)
    request = caches.add()
    x = {request: random(600, 64).bfloat16()}
    (pages,) = caches.pages.values()
    used = []
    run(caches, layer, x, [(request, 0, 300)])
    for at in range(300, 600):
        run(caches, layer, x, [(request, at, at + 1)])
        used.append(pages.count - len(pages.free))
    assert max(used[1:]) <= 128 // 16 + 2
    with pytest.raises(ValueError, match="the window of request 0 begins at token 464"):
        caches.truncate(request, 590 - 128)
    caches.truncate(request, 598)


def test_states_reach_as_far_as_they_say():
    layer = layer_of("v4-128")
    caches = LayerCaches([layer], page=256, drafts=8)  # no page of the window is released here
    request = caches.add()
    x = {request: random(300, 64).bfloat16()}
    run(caches, layer, x, [(request, 0, 300)])
    # The ring has the rows from 300 - (128 + 8) on. Length 200 needs those from 128 on, 256 none.
    with pytest.raises(ValueError, match="compressor's state of request 0 begins at token 164"):
        caches.truncate(request, 200)
    caches.truncate(request, 290)
    caches.truncate(request, 256)
    step = caches.begin([(request, 30)])
    with pytest.raises(ValueError, match="accepted: expected 0 to 30"):
        caches.commit(step, {request: 31})
    with pytest.raises(ValueError, match="expected every request once"):
        caches.begin([(request, 1), (request, 1)])
    with pytest.raises(ValueError, match="expected one that add"):
        caches.begin([(7, 1)])
    with pytest.raises(ValueError, match="expected 0 to 256 for request 0, found 257"):
        caches.copy(request, 257)
    with pytest.raises(ValueError, match="dtype: expected fp8 or bf16"):
        LayerCaches([layer], dtype="fp4")


@pytest.mark.parametrize("kind", KINDS)
def test_requests_begin_anew(kind):
    """After truncate(0), or a step that was never committed, a request is as good as a new one."""
    layer = layer_of(kind)
    x = random(300, 64, seed=1).bfloat16()
    for back in ("truncate", "abandon"):
        caches = LayerCaches([layer], page=16)
        fresh, request = caches.add(), caches.add()
        want = run(caches, layer, {fresh: x}, [(fresh, 0, 150)])[0]
        other = {request: random(300, 64, seed=2).bfloat16()}
        if back == "truncate":
            run(caches, layer, other, [(request, 0, 300)])
            caches.truncate(request, 0)
        else:
            layer(other[request], caches.begin([(request, 300)]))
        for a, b in ((0, 5), (5, 6), (6, 150)):
            close(run(caches, layer, {request: x}, [(request, a, b)])[0], want[a:b])


def test_rings_begin_anew():
    """Behind what a ring holds, a request goes on where an entry begins, and not before that."""
    layer = layer_of("v4-128")
    caches = LayerCaches([layer], page=1024)
    request = caches.add()
    x = {request: random(700, 64, seed=1).bfloat16()}
    want = run(caches, layer, x, [(request, 0, 700)])[0]
    caches.truncate(request, 256)
    close(run(caches, layer, x, [(request, 256, 261)])[0], want[256:261])
    with pytest.raises(ValueError, match="state of request 0 begins at token 256, 250 would need"):
        caches.truncate(request, 250)
    close(run(caches, layer, x, [(request, 261, 700)])[0], want[261:])


@pytest.mark.parametrize("kinds", [("mla", "mla"), ("v4-4", "v4-128"), ("v4-0", "v4-4")])
@pytest.mark.parametrize("past", [5, 300])
def test_a_failed_step_keeps_the_past(kinds, past):
    """One layer ran, or all of them, and then something failed: the next step has the same bits."""
    layers = [layer_of(kind) for kind in kinds]
    x, other = random(past + 40, 64, seed=1).bfloat16(), random(300, 64, seed=2).bfloat16()

    def outputs(failed=0, ran=0):
        caches = LayerCaches(layers, page=16)
        request = caches.add()
        for a, b in ((0, past), (past, past + 40)):
            if a == past and failed:
                step = caches.begin([(request, failed)])
                for layer in layers[:ran]:
                    layer(other[:failed], step)
            step = caches.begin([(request, b - a)])
            y = torch.cat([layer(x[a:b], step) for layer in layers])
            caches.commit(step)
        return y

    want = outputs()
    for failed in (1, 3, 10, 300):
        for ran in (1, 2):
            assert torch.equal(outputs(failed, ran), want), (failed, ran)


def test_steps_are_used_once():
    """A step ends with commit(), or when a request of it changes: its pages may be another's."""
    layer = layer_of("v4-4")
    caches, x = LayerCaches([layer], page=16), random(5, 64).bfloat16()

    def refused(step, also=caches):
        with pytest.raises(ValueError, match="caches: step: expected one of begin"):
            also.commit(step)

    request, other = caches.add(), caches.add()
    step = caches.begin([(request, 5)])
    layer(x, step)
    refused(step, LayerCaches([layer]))
    caches.commit(step)
    refused(step)
    assert caches.length(request) == 5
    first = caches.begin([(request, 5)])
    second = caches.begin([(request, 5), (other, 0)])
    refused(first)
    caches.truncate(request, 4)
    refused(second)
    step = caches.begin([(other, 5)])
    caches.free(other)
    refused(step)
    with pytest.raises(ValueError, match="layers: step: it is committed, or one of its requests"):
        layer(x, step)
    assert caches.length(request) == 4


def test_layers_of_several_caches():
    """A layer's place is a matter of the caches."""
    one, two = layer_of("mla"), layer_of("v4-4")
    both, alone = LayerCaches([one, two]), LayerCaches([two])
    step = both.begin([(both.add(), 5)])
    x = random(5, 64).bfloat16()
    for layer in (one, two):
        assert layer(x, step).shape == (5, 64)
    with pytest.raises(ValueError, match="expected one of caches that were made for this layer"):
        one(x, alone.begin([(alone.add(), 5)]))
    with pytest.raises(ValueError, match="layers: expected every layer once"):
        LayerCaches([one, one])
    with pytest.raises(ValueError, match="layers: expected one or more"):
        LayerCaches([])
    with pytest.raises(ValueError, match="drafts: expected 0 or more, found -1"):
        LayerCaches([one], drafts=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_takes(kind):
    layer = layer_of(kind)
    caches = LayerCaches([layer], page=16)
    request = caches.add()
    for parts in ([], [(request, 0)]):
        step = caches.begin(parts)
        assert layer(torch.empty(0, 64), step).shape == (0, 64)
        caches.commit(step)
    step = caches.begin([(request, 5)])
    for shape in ((4, 64), (6, 64), (64,), (1, 5, 64), (5, 32)):
        with pytest.raises(ValueError, match=r"layers: x: expected \[5, 64\], found"):
            layer(torch.zeros(shape), step)
    with pytest.raises(ValueError, match="layers: x: expected floating point"):
        layer(torch.zeros(5, 64, dtype=torch.int32), step)
    with pytest.raises(NotImplementedError, match="inference only"):
        layer(torch.zeros(5, 64, requires_grad=True), step)
    with pytest.raises(TypeError):
        caches.begin([(request, 1.5)])


def test_many_requests_grow():
    """Requests come and go; pages and rows of tables grow and are used again."""
    layer = layer_of("v4-4")
    caches = LayerCaches([layer], page=16)
    x = random(40, 64).bfloat16()
    want = None
    for _ in range(3):
        requests = [caches.add() for _ in range(9)]
        rows = dict.fromkeys(requests, x)
        for y in run(caches, layer, rows, [(request, 0, 40) for request in requests]):
            want = y if want is None else want
            close(y, want)
        for request in requests[::2]:
            caches.free(request)
        for request in requests[1::2]:
            caches.free(request)
    assert max(caches.requests, default=-1) < 9
    assert all(p.count < 9 * 3 * 2 for p in caches.pages.values())


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_of_some_steps(kind):
    layer = layer_of(kind)
    x = random(300, 64, seed=1).bfloat16()
    with torch.inference_mode():
        caches = LayerCaches([layer], page=16)
        request = caches.add()
        run(caches, layer, {request: x}, [(request, 0, 100)])
    run(caches, layer, {request: x}, [(request, 100, 200)])
    with torch.no_grad():
        other = caches.copy(request)
        run(caches, layer, {request: x, other: x}, [(other, 200, 201), (request, 200, 220)])


def test_without_memory(monkeypatch):
    """What finds no memory leaves requests and pages as they were."""
    layer = layer_of("v4-4")
    caches = LayerCaches([layer], page=16)
    request = caches.add()
    x = {request: random(300, 64).bfloat16()}
    run(caches, layer, x, [(request, 0, 20)])
    used = caches.used_bytes()
    real, asked = torch.zeros, []

    def refuse(*args, **keywords):
        asked.append(args)
        if len(asked) > 1:
            raise MemoryError("none left")
        return real(*args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", refuse)
        with pytest.raises(MemoryError, match="none left"):
            caches.begin([(request, 280)])
    assert len(asked) == 2 and caches.used_bytes() == used and caches.length(request) == 20
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", refuse)
        with pytest.raises(MemoryError, match="none left"):
            caches.add()
    assert list(caches.requests) == [request] and caches.add() == request + 1
    run(caches, layer, x, [(request, 20, 300)])


def test_rope_parameters():
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert Rope.of(yarn) == Rope(10000.0, 40.0, 4096)
    assert Rope.of({"rope_theta": 5.0}) == Rope(5.0)
    for change, words in (
        ({"rope_type": "llama3"}, "expected default or yarn, found llama3"),
        ({"mscale": 0.5}, "attention_factor: expected 1"),
        ({"truncate": False}, "truncate"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            Rope.of(yarn | change)


def test_layer_without_indexer_needs_one_before():
    config = MlaConfig(**{**MLA.__dict__, "indexer": False})
    layer = MlaLayer(config, mla_weights(MLA))
    caches = LayerCaches([layer])
    step = caches.begin([(caches.add(), 3)])
    with pytest.raises(ValueError, match="a layer without an indexer needs one with it before"):
        layer(random(3, 64), step)
