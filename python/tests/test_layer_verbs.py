"""The verbs around attention against torch formulas: norm, RoPE, queries, compressor, prologue.

A result is the bf16 nearest to what the formula gives in fp32, or a neighbour where the fp32 sums
of the two differ: within one step of bf16, 2^-7 of the value, and bitwise where there are no sums.
"""

import math

import pytest
import torch

import winnow
from conftest import on
from reference import records

STEP = 2.0**-7


def random(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def near(got, want, steps=1):
    """Each value within `steps` of bf16 of what is wanted; tiny ones of the largest's share."""
    got, want = got.float().cpu(), want.float().cpu()
    bound = steps * STEP * want.abs().clamp(min=2.0**-10 * float(want.abs().max()))
    worst = ((got - want).abs() / bound).max()
    assert worst <= 1, f"{worst:.3g} of the bound"


def frequencies(theta, factor=1.0, original=0):
    f = theta ** (-torch.arange(0, 64, 2).double() / 64)
    if factor == 1.0:
        return f

    def pair(turns):
        return 64 * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), 63)
    ramp = ((torch.arange(32).double() - low) / (high - low)).clamp(0, 1)
    return f * (1 - ramp) + f / factor * ramp


def table_of(positions=300, device="cpu", **yarn):
    table = torch.empty(positions, 2, 32, device=device)
    winnow.rope_table(table, **yarn)
    return table


def rotated(x, positions, table, pairs="interleaved", slice="last", sign=1.0):
    """RoPE in fp32, not rounded."""
    x, table = x.float().cpu(), table.cpu()
    part = x[..., -64:] if slice == "last" else x[..., :64]
    c, s = table[positions.long().cpu()].unbind(1)
    c, s = [y.view(-1, *[1] * (x.dim() - 2), 32) for y in (c, sign * s)]
    half = pairs == "half"
    u, v = (part[..., :32], part[..., 32:]) if half else (part[..., 0::2], part[..., 1::2])
    u, v = u * c - v * s, v * c + u * s
    part = torch.cat([u, v], -1) if half else torch.stack([u, v], -1).flatten(-2)
    return torch.cat(
        [x[..., :-64], part] if slice == "last" else [part, x[..., 64:]],
        -1,
    )


def hadamard(x):
    i = torch.arange(128)
    bits = (i[:, None] & i[None]).int()
    ones = sum((bits >> k) & 1 for k in range(7))
    return (x @ (1.0 - 2.0 * (ones % 2))) * 128**-0.5


def rms(x, weight=None, eps=1e-6):
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


@on("norm")
@pytest.mark.parametrize("d", [128, 512, 1536])
def test_norm(d, device):
    x = random(9, d).bfloat16()
    weight, bias = 1 + 0.2 * random(d, seed=1), random(d, seed=2)
    for eps in (1e-6, 1e-20, 0.5):
        near(winnow.norm(x.to(device), weight.to(device), eps=eps), rms(x, weight, eps))
        near(winnow.norm(x.to(device), eps=eps), rms(x, None, eps))
        want = torch.nn.functional.layer_norm(x.float(), (d,), weight, bias, eps)
        got = winnow.norm(
            x.to(device), weight.to(device), norm="layer", norm_bias=bias.to(device), eps=eps
        )
        # Where the bias cancels a value, the step is that of the terms.
        assert ((got.float().cpu() - want).abs() <= STEP * (want.abs() + bias.abs() + 0.01)).all()


@on("rotate")
@pytest.mark.parametrize(
    "yarn",
    [
        {"theta": 10000.0},
        {"theta": 10000.0, "factor": 40.0, "original": 4096},
        {"theta": 160000.0, "factor": 16.0, "original": 65536},
    ],
    ids=["plain", "v32", "v4"],
)
def test_rope_table(yarn, device):
    table = table_of(5000, device, **yarn).cpu()
    # An angle is a product of floats, rounded to a float.
    angles = (torch.arange(5000).float()[:, None] * frequencies(**yarn).float()).double()
    # A frequency may be the float beside ours: the angle then moves by 2^-23 of itself.
    bound = 2.0**-22 * angles.abs() + 2.0**-22
    assert ((table[:, 0].double() - angles.cos()).abs() <= bound).all()
    assert ((table[:, 1].double() - angles.sin()).abs() <= bound).all()


@on("rotate")
@pytest.mark.parametrize("pairs", ["interleaved", "half"])
@pytest.mark.parametrize("slice", ["last", "first"])
def test_rotate(pairs, slice, device):
    table = table_of(device=device)
    x = random(5, 3, 128).bfloat16()
    positions = torch.tensor([0, 1, 17, 255, 299], dtype=torch.int32)
    options = {"pairs": pairs, "slice": slice}
    got = winnow.rotate(x.to(device), positions.to(device), table, **options)
    near(got, rotated(x, positions, table, **options))
    rest = slice_of(slice)
    assert torch.equal(got.cpu()[..., rest], x[..., rest])
    # There and back again: two roundings.
    back = winnow.rotate(got, positions.to(device), table, inverse=True, **options)
    assert (back.cpu().float() - x.float()).abs().max() <= 4 * STEP * x.float().abs().max()
    near(
        winnow.rotate(x.to(device), positions.to(device), table, inverse=True, **options),
        rotated(x, positions, table, sign=-1.0, **options),
    )


def test_rotate_e4m3():
    """Codes and scales are those of index keys over rotate()'s own bf16."""
    table, x = table_of(), random(5, 3, 256, seed=4).bfloat16()
    positions = torch.tensor([0, 1, 17, 255, 299], dtype=torch.int32)
    turned = winnow.rotate(x, positions, table, inverse=True)
    codes, scales = winnow.rotate(x, positions, table, inverse=True, e4m3=True)
    page = torch.zeros(1, 30 * 132, dtype=torch.uint8)
    winnow.write(turned.view(30, 128), torch.arange(30), winnow.Cache(page, "index_keys", 30))
    assert torch.equal(codes.view(torch.uint8).flatten(), page[0, : 30 * 128])
    assert torch.equal(scales.flatten(), page[0, 30 * 128 :].view(torch.float32))


def test_select_blocks():
    logits = random(4, 100, seed=9)
    ids, best = winnow.select(logits, 12, best=3)
    largest = torch.nn.functional.pad(logits, (0, 4), value=-torch.inf).view(4, 13, 8).amax(-1)
    largest[:, -1] = torch.inf  # the last block is always there
    assert torch.equal(best.long(), largest.topk(3).indices.sort().values)
    assert torch.equal(ids, winnow.select(logits, 12))
    inside = winnow.select(logits, 12, within=best)
    allowed = (best.long()[:, :, None] * 8 + torch.arange(8)).flatten(1)
    masked = torch.full((4, 104), -torch.inf).scatter(1, allowed, 1.0)[:, :100]
    want = torch.where(masked > 0, logits, -torch.inf).topk(12).indices.sort().values
    assert torch.equal(inside.long(), want)


def test_pipeline_from_projections():
    """A C4A layer: one call, and the verbs one after the other."""
    tokens, heads, page, pages = 12, 2, 8, 4
    plan = winnow.Plan(
        model="v4",
        format="v4_bf16",
        heads=heads,
        extra_topk=4,
        index_heads=2,
        page=page,
        pages=pages,
        max_requests=1,
        max_tokens=16,
    )
    plan.refill([0, tokens], [tokens])
    table, norm = table_of(), 1 + 0.1 * random(512, seed=1)
    block_table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    positions = torch.arange(tokens, dtype=torch.int32)
    slots = block_table[0].long()[positions // page] * page + positions % page

    def cache(fmt):
        memory = torch.zeros(winnow.cache_shape(fmt, pages, page), dtype=torch.uint8)
        return winnow.Cache(memory, fmt, page)

    q, kv = random(tokens, heads, 512, seed=2).bfloat16(), random(tokens, 512, seed=3).bfloat16()
    rows, index_rows = random(tokens, 2048, seed=4), random(tokens, 512, seed=5)
    bias, index_bias = random(4, 1024, seed=6), random(4, 256, seed=7)
    raw_q, raw_weights = random(tokens, 2, 128, seed=8).bfloat16(), random(tokens, 2, seed=9)
    mine = [cache("v4_bf16"), cache("v4_bf16"), cache("index_keys_bf16")]
    states = [torch.zeros(1, 16, 2048), torch.zeros(1, 16, 512)]
    prepared = q.clone()
    out = winnow.pipeline(
        plan, prepared, kv, slots, mine[0], block_table, scale=0.05, table=table, kv_norm=norm,
        q_norm=True, overlap=True, ring=True, compressed=mine[1], compressed_table=block_table,
        state_rows=rows, state_bias=bias, state_norm=norm, state=states[0], index_keys=mine[2],
        index_table=block_table, index_rows=index_rows, index_bias=index_bias,
        index_norm=norm[:128], index_state=states[1], raw_index_q=raw_q,
        raw_index_weights=raw_weights, index_factor=0.1,
    )  # fmt: skip

    theirs = [cache("v4_bf16"), cache("v4_bf16"), cache("index_keys_bf16")]
    want_q = winnow.prepare_query(q, positions, table, norm="rms")
    assert torch.equal(prepared, want_q)
    winnow.write(
        kv, slots, theirs[0], norm="rms", norm_weight=norm, table=table, positions=positions
    )
    entries = winnow.compressed_slots(positions, torch.zeros_like(positions), block_table,
                                      ratio=4, page=page, pages=pages)  # fmt: skip
    same = {"requests": torch.zeros_like(positions), "overlap": True, "ring": True, "table": table}
    own = [torch.zeros_like(x) for x in states]
    winnow.compress(rows, positions, bias=bias, norm_weight=norm, state=own[0], slots=entries,
                    cache=theirs[1], **same)  # fmt: skip
    winnow.compress(index_rows, positions, bias=index_bias, norm_weight=norm[:128], state=own[1],
                    slots=entries, cache=theirs[2], **same)  # fmt: skip
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.data, b.data)
    assert all(torch.equal(a, b) for a, b in zip(states, own, strict=True))
    requests = torch.zeros_like(positions)
    index_q, weights = winnow.index_query(
        raw_q, raw_weights, positions, table, factor=0.1, bf16=True
    )
    ids = winnow.score_select(
        index_q, weights, (positions + 1) // 4, 4, keys=theirs[2], block_table=block_table,
        requests=requests,
    )  # fmt: skip
    place = {"page": page, "pages": pages}
    window, _ = winnow.window_lists(positions, requests, block_table, window=128, **place)
    extra = winnow.locate(ids, requests, block_table, **place)
    want = winnow.attend(
        want_q, theirs[0], window, extra_cache=theirs[1], extra_indices=extra, scale=0.05
    )
    want = winnow.rotate(want, positions, table, inverse=True)
    torch.testing.assert_close(out.float(), want.float(), rtol=2**-6, atol=1e-2)


def test_pipeline_keeps_entries_of_one_token():
    """V4.1's ratio 1: an entry is its token's row, without a gate and without a state."""
    tokens, page, pages = 5, 8, 1
    plan = winnow.Plan(
        model="v4", format="v4_bf16", heads=2, extra_topk=8, ratio=1, page=page, pages=pages,
        max_requests=1, max_tokens=8,
    )  # fmt: skip
    plan.refill([0, tokens], [tokens])
    table, norm, block_table = table_of(), random(512, seed=1), torch.zeros(1, 1, dtype=torch.int32)
    positions = torch.arange(tokens, dtype=torch.int32)
    q, kv = random(tokens, 2, 512, seed=2).bfloat16(), random(tokens, 512, seed=3).bfloat16()
    rows = random(tokens, 512, seed=4)
    window, mine, theirs = (
        winnow.Cache(torch.zeros(pages, page, 512).bfloat16(), "v4_bf16") for _ in range(3)
    )
    winnow.pipeline(
        plan, q, kv, positions.long(), window, block_table, scale=0.05, table=table,
        gate=False, compressed=mine, compressed_table=block_table, state_rows=rows, state_norm=norm,
    )  # fmt: skip
    winnow.compress(
        rows, positions, ratio=1, gate=False, norm_weight=norm, table=table, cache=theirs,
        slots=positions.long(),
    )  # fmt: skip
    assert mine.data.any() and torch.equal(mine.data, theirs.data)


def slice_of(name):
    """The values that RoPE leaves alone."""
    return slice(None, -64) if name == "last" else slice(64, None)


@on("prepare_query")
def test_prepare_query(device):
    table = table_of(device=device)
    q = random(4, 6, 512).bfloat16().to(device)
    positions = torch.tensor([3, 0, 200, 299], dtype=torch.int32, device=device)
    # V4: the norm of each head, then RoPE; the bits of the two calls.
    got = winnow.prepare_query(q, positions, table, norm="rms")
    normed = winnow.norm(q.view(24, 512)).view(4, 6, 512)
    assert torch.equal(got, winnow.rotate(normed, positions, table))
    near(got, rotated(rms(q.cpu()).bfloat16(), positions, table), 2)
    # V3.2: the last 64 values of heads that are wider.
    wide = random(4, 6, 192, seed=1).bfloat16().to(device)
    got = winnow.prepare_query(wide[..., 128:], positions, table)
    assert got.shape == (4, 6, 64)
    near(got, rotated(wide[..., 128:], positions, table))


@on("index_query")
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("scale", ["pow2", "amax"])
def test_index_query(turn, scale, device):
    table = table_of(device=device)
    q = random(5, 8, 128).bfloat16().to(device)
    weights = random(5, 8, seed=1).bfloat16().to(device)
    positions = torch.arange(5, dtype=torch.int32, device=device) * 50
    options = {"hadamard": turn, "pairs": "half", "slice": "first", "factor": 0.03}
    exact, plain = winnow.index_query(q, weights, positions, table, bf16=True, **options)
    want = rotated(q, positions, table, pairs="half", slice="first").bfloat16().float()
    near(exact, hadamard(want) if turn else want, 2)
    assert torch.equal(plain, weights.float() * 0.03)
    got, made = winnow.index_query(q, weights, positions, table, scale=scale, **options)
    # The quantiser of the values that the bf16 form gives, and its scale in the weights.
    amax = exact.float().abs().amax(-1).clamp(min=1e-4)
    s = amax / 448
    if scale == "pow2":
        s = torch.exp2(torch.ceil(torch.log2(s)))
    torch.testing.assert_close(made, weights.float() * s * 0.03, rtol=1e-6, atol=0)
    error = (got.float() * s[..., None] - exact.float()).abs()
    assert (error <= exact.float().abs() / 16 * 1.001 + s[..., None] * 2.0**-10).all()


def entry_rows(values, scores, bias, ratio, overlap, d):
    """Pooled entries in fp64 from rows of all positions."""
    out = []
    for w in range(len(values) // ratio):
        rows, weights = [], []
        for p in range((w - 1) * ratio if overlap else w * ratio, (w + 1) * ratio):
            if p < 0:
                continue
            old = overlap and p < w * ratio
            part = slice(0, d) if old or not overlap else slice(d, 2 * d)
            rows.append(values[p, part])
            weights.append(scores[p, part] + bias[p % ratio, part])
        z = torch.stack(weights).double().softmax(0)
        out.append((z * torch.stack(rows).double()).sum(0))
    return torch.stack(out).float() if out else torch.empty(0, d)


@on("compress", "write")
@pytest.mark.parametrize(
    ("ratio", "overlap", "d"),
    [(4, True, 512), (4, True, 128), (128, False, 512), (2, False, 512)],
    ids=["c4a", "c4a-index", "c128a", "ratio2"],
)
def test_compress(ratio, overlap, d, device):
    """Entries of two requests, cut into chunks of any length, with drafts that are rewritten."""
    length, width = 300, d * (2 if overlap else 1)
    fmt = "v4_bf16" if d == 512 else "index_keys"
    bias = random(ratio, width, seed=5)
    norm = 1 + 0.2 * random(d, seed=6)
    table = table_of(device=device)
    rows = [random(length, 2 * width, seed=s) for s in (7, 8)]
    pages = -(-(length // ratio) // 16)
    blocks = torch.arange(2 * pages, dtype=torch.int32, device=device).view(2, pages).flip(1)

    def run(chunks):
        memory = torch.zeros(
            winnow.cache_shape(fmt, 2 * pages, 16), dtype=torch.uint8, device=device
        )
        reach = ratio * (2 if overlap else 1)
        state = torch.full((2, reach + 4, 2 * width), float("nan"), device=device)
        for parts in chunks:
            new = torch.cat([rows[r][a:b] for r, a, b in parts]).to(device)
            at = [torch.arange(a, b, dtype=torch.int32) for _, a, b in parts]
            positions = torch.cat(at).to(device)
            owners = [torch.full((b - a,), r, dtype=torch.int32) for r, a, b in parts]
            requests = torch.cat(owners).to(device)
            winnow.compress(
                new,
                positions,
                requests=requests,
                ratio=ratio,
                overlap=overlap,
                bias=bias.to(device),
                state=state,
                ring=True,
                norm_weight=norm.to(device),
                table=table,
                slots=winnow.compressed_slots(
                    positions, requests, blocks, ratio=ratio, page=16, pages=2 * pages
                ),
                cache=winnow.Cache(memory, fmt, 16),
            )
        return memory

    whole = run([[(0, 0, length), (1, 0, length)]])
    kept = records(whole.cpu(), fmt, 16).view(2 * pages, 16, d)
    for r in range(2):
        got = kept[blocks[r].cpu().long()].view(-1, d)[: length // ratio]
        want = entry_rows(*rows[r].split(width, 1), bias, ratio, overlap, d)
        want = rms(want, norm).bfloat16()
        want = rotated(want, torch.arange(len(want)) * ratio, table)
        if d == 512:
            near(got, want, 2)
        else:
            assert ((got - want).abs() <= want.abs() / 8 + float(want.abs().max()) / 100).all()
    cuts = [[(0, 0, 5)], [(1, 0, 130), (0, 5, 6)], [(0, 6, 200)]]
    # Drafts 200 to 203, of which 202 and 203 come again.
    cuts += [[(1, 130, 131), (0, 200, 204)], [(0, 202, 299), (1, 131, 299)]]
    cuts += [[(0, 299, 300), (1, 299, 300)]]
    assert torch.equal(whole, run(cuts))


@on("compress", "write")
def test_latent(device):
    """Ratio 1 without a gate (V4.1): a norm of the row; the latent is that before RoPE."""
    x, norm = random(6, 512), 1 + 0.2 * random(512, seed=1)
    positions = torch.arange(6, dtype=torch.int32)
    latent = torch.zeros(6, 512, dtype=torch.bfloat16, device=device)
    table = table_of(device=device)
    memory = torch.zeros(winnow.cache_shape("v4_bf16", 1, 16), dtype=torch.uint8, device=device)
    winnow.compress(
        x.to(device),
        positions.to(device),
        ratio=1,
        gate=False,
        norm_weight=norm.to(device),
        table=table,
        slots=torch.arange(6).to(device),
        cache=winnow.Cache(memory, "v4_bf16", 16),
        latent=latent,
    )
    near(latent, rms(x, norm))
    near(records(memory.cpu(), "v4_bf16", 16)[:6], rotated(latent, positions, table))


@on("write", "norm", "rotate")
@pytest.mark.parametrize("fmt", ["v32_fp8", "v32_bf16", "v4_fp8", "v4_bf16", "index_keys"])
def test_write_prologue(fmt, device):
    """A projection's row into a record: the bytes of norm(), rotate() and write()."""
    d = winnow.record_dim(fmt)
    x = random(7, d).bfloat16().to(device)
    width = 128 if fmt == "index_keys" else 512
    weight, bias = (1 + 0.2 * random(width, seed=1)).to(device), random(width, seed=2).to(device)
    positions = torch.arange(7, dtype=torch.int32, device=device) * 40
    slots = torch.tensor([5, 3, -1, 0, 9, 14, 2], device=device)
    table = table_of(device=device)
    index = fmt == "index_keys"
    norm = {"norm": "layer", "norm_bias": bias} if index else {"norm": "rms"}
    rope = {"pairs": "half", "slice": "first"} if index else {}

    def cache():
        memory = torch.zeros(winnow.cache_shape(fmt, 1, 16), dtype=torch.uint8, device=device)
        return memory, winnow.Cache(memory, fmt, 16)

    fused, into = cache()
    options = {**norm, **rope, "norm_weight": weight, "positions": positions, "table": table}
    winnow.write(x, slots, into, **options)
    rows = x.clone()
    rows[:, :width] = winnow.norm(x[:, :width].contiguous(), weight, **norm)
    rows = winnow.rotate(rows.view(7, 1, d), positions, table, **rope).view(7, d)
    single, into = cache()
    winnow.write(rows, slots, into)
    assert torch.equal(fused, single)
    if not fmt.endswith("bf16"):
        return
    want = x.float().cpu()
    want[:, :width] = rms(want[:, :width], weight.cpu())
    want = rotated(want.bfloat16(), positions, table)
    stored = slots >= 0
    near(records(fused.cpu(), fmt, 16)[slots[stored].cpu()], want[stored.cpu()], 2)
