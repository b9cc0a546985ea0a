"""Every operation against fp64 PyTorch, over shapes, strides and dtypes; small cases, drawn by
hypothesis from fixed seeds."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
import winnow
import winnow.torch
from conftest import DECODE_LSE, DECODE_OUT, PREFILL_LSE, PREFILL_OUT, on

INT = torch.int32
BF16_STEP = 2.0**-8  # relative distance of neighbours; half of it is a rounding


def cases(n=15):
    return settings(max_examples=n, deadline=None, derandomize=True, database=None)


class Draw:
    """Random tensors of one example, with strides of its choosing."""

    def __init__(self, seed, gaps=False, device="cpu"):
        self.g, self.gaps, self.device = torch.Generator().manual_seed(seed), gaps, device

    def spaced(self, x):
        """The same values with a gap behind every row."""
        if not self.gaps or x.dim() < 2:
            return x.to(self.device)
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide.to(self.device)[..., : x.shape[-1]]

    def bf16(self, *shape):
        return self.spaced(torch.randn(*shape, generator=self.g).bfloat16())

    def f32(self, *shape):
        return self.spaced(torch.randn(*shape, generator=self.g))

    def e4m3(self, *shape):
        x = torch.randn(*shape, generator=self.g).to(torch.float8_e4m3fn).view(torch.uint8)
        return self.spaced(x).view(torch.float8_e4m3fn)

    def ints(self, low, high, *shape):
        return self.spaced(torch.randint(low, high, shape, generator=self.g, dtype=INT))

    def cache(self, fmt, pages, page):
        """A cache with every record written, and its values in fp64."""
        size = winnow.page_bytes(fmt, page) + (32 if self.gaps else 0)
        memory = torch.full((pages, size), 0xFF, dtype=torch.uint8, device=self.device)
        cache = winnow.Cache(memory, fmt, page)
        slots = torch.arange(pages * page, device=self.device)
        # Powers of two: Hopper rounds scales to fp16, which costs other scales some accuracy.
        rows = self.bf16(pages * page, winnow.record_dim(fmt))
        winnow.write(rows, slots, cache, scale="pow2")
        return cache, reference.records(memory.cpu(), fmt, page)


shapes = st.tuples(st.integers(0, 2**31), st.booleans())
LATENT = ["v32_fp8", "v32_bf16", "v4_fp8", "v4_bf16"]


@on("attend", "write")
@cases(25)
@given(
    shapes,
    st.sampled_from(LATENT),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(0, 70),
    st.booleans(),
)
def test_attend(device, start, fmt, tokens, heads, topk, two):
    d = Draw(*start, device)
    model = winnow.V32 if fmt.startswith("v32") else winnow.V4
    q, sink = d.bf16(tokens, heads, model.d_qk), d.f32(heads)
    cache, rows = d.cache(fmt, 5, 7)
    indices, lengths = d.ints(-3, 40, tokens, topk), d.ints(0, topk + 2, tokens)
    extra, lists = {}, [(rows, indices, lengths)]
    if two:
        extra_cache, extra_rows = d.cache(fmt, 3, 2)
        extra_indices = d.ints(-1, 7, tokens, 5)
        extra = {"extra_cache": extra_cache, "extra_indices": extra_indices}
        lists.append((extra_rows, extra_indices, None))
    got = winnow.attend(
        q, cache, indices, lengths=lengths, sink=sink, scale=0.05, lse=True, max_logit=True, **extra
    )
    out, lse, top, magnitude = reference.attend(q, lists, 0.05, sink)
    DECODE_OUT.check(got[0], out, magnitude)
    DECODE_LSE.check(got[1], lse)
    DECODE_LSE.check(got[2], top)


@on("attend", "write")
def test_attend_halves_ids_and_contiguous_rows(device):
    d = Draw(3, device=device)
    kv, q = d.bf16(30, 576), d.bf16(4, 6, 576)
    indices = d.ints(-1, 32, 4, 9)
    want = winnow.attend(q, winnow.Cache(kv, "v32_bf16"), indices, scale=576**-0.5)
    out, _, _, magnitude = reference.attend(q, [(kv.double(), indices, None)], 576**-0.5)
    DECODE_OUT.check(want, out, magnitude)
    halves = winnow.attend(
        q[..., :512], winnow.Cache(kv, "v32_bf16"), indices, q_rope=q[..., 512:], scale=576**-0.5
    )
    assert torch.equal(halves, want)
    # The same rows as pages of 10 behind a block table, and apart from each other.
    paged = winnow.Cache(kv.view(3, 10, 576), "v32_bf16")
    table = torch.tensor([[1, 0, 2]], dtype=INT, device=device)
    slots = winnow.locate(
        indices, torch.zeros(4, dtype=INT, device=device), table, page=10, pages=3
    )
    by_ids = winnow.attend(
        q,
        paged,
        indices,
        block_table=table,
        requests=torch.zeros(4, dtype=INT, device=device),
        scale=576**-0.5,
    )
    assert torch.equal(by_ids, winnow.attend(q, paged, slots, scale=576**-0.5))
    apart = torch.zeros(30, 2, 576, dtype=torch.bfloat16, device=device)
    apart[:, 1] = kv
    again = winnow.attend(q, winnow.Cache(apart[:, 1], "v32_bf16"), indices, scale=576**-0.5)
    assert torch.equal(again, want)


@on("mha")
@cases(25)
@given(
    shapes,
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 40),
    st.sampled_from([16, 40, 192]),
    st.booleans(),
)
def test_attend_mha(device, start, tokens, heads, keys, d_qk, shared):
    d = Draw(*start, device)
    q, d_v = d.bf16(tokens, heads, d_qk), d_qk // 2
    k = d.bf16(keys, 1, d_qk).expand(-1, heads, -1) if shared else d.bf16(keys, heads, d_qk)
    v = d.bf16(keys, heads, d_v)
    ids, sink = d.ints(-2, keys + 3, tokens, 12), d.f32(heads)
    mask = torch.randint(0, 2, (tokens, keys), generator=d.g, dtype=torch.bool).to(device)
    bias = d.f32(tokens, keys)
    got, lse = winnow.attend_mha(
        q, k, v, ids=ids, mask=mask, bias=bias, sink=sink, scale=0.2, lse=True
    )
    chosen = torch.zeros(tokens, keys + 5, dtype=torch.bool)
    inside = torch.where((ids >= 0) & (ids < keys), ids, keys).cpu().long()
    chosen.scatter_(1, inside, True)
    logits = torch.einsum("thd,khd->thk", q.double().cpu(), k.double().cpu()) * 0.2
    logits = logits + bias.double().cpu()[:, None]
    allowed = chosen[:, :keys] & mask.cpu()
    logits = logits.masked_fill(~allowed[:, None], -reference.INF)
    out, want_lse, _, magnitude = reference.softmax_over(
        logits, v[None].expand(tokens, -1, -1, -1), sink
    )
    PREFILL_OUT.check(got, out, magnitude)
    DECODE_LSE.check(lse, want_lse)


@on("merge")
@cases()
@given(shapes, st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_merge(device, start, tokens, heads, parts, as_bf16):
    d = Draw(*start, device)
    partial = d.bf16(parts, tokens, heads, 32) if as_bf16 else d.f32(parts, tokens, heads, 32)
    lse = d.f32(parts, tokens, heads)
    lse[0, 0, 0] = float("inf")  # empty
    sink = d.f32(heads)
    got, got_lse = winnow.merge(partial, lse, sink=sink, lse=True)
    partial, lse, sink = partial.cpu(), lse.cpu(), sink.cpu()
    weights = lse.double().masked_fill(torch.isinf(lse), -reference.INF)
    total = weights.logsumexp(0)
    p = torch.exp(weights - total).nan_to_num(0.0) * torch.sigmoid(
        total - sink.double()
    ).nan_to_num(0.0)
    out, magnitude = (
        (p[..., None] * partial.double()).sum(0),
        (p[..., None] * partial.double().abs()).sum(0),
    )
    PREFILL_OUT.check(got, out, magnitude)
    PREFILL_LSE.check(got_lse, total)


@on("score", "select")
@cases()
@given(shapes, st.integers(1, 5), st.integers(1, 16), st.integers(1, 50), st.integers(1, 60))
def test_score_and_select(device, start, tokens, heads, keys, topk):
    d = Draw(*start, device)
    q, rows = d.e4m3(tokens, heads, 128), d.e4m3(keys, 128)
    weights, scales = d.f32(tokens, heads), d.f32(keys).abs()
    starts, ends = d.ints(0, keys, tokens), d.ints(0, keys + 2, tokens)
    got = winnow.score(
        q, weights, ends, starts=starts, key_rows=rows, key_scales=scales, clean=True
    )
    cpu = [x.cpu() for x in (q, weights, rows, scales, starts, ends)]
    want = reference.score(*cpu)
    assert torch.equal(torch.isinf(got).cpu(), torch.isinf(want))
    # include/winnow/score.h: of the sum of magnitudes; Hopper adds fp8 products with 14 bits.
    bound = reference.score(cpu[0].double().abs(), cpu[1].abs(), cpu[2].double().abs(), *cpu[3:])
    error = (got.cpu().double() - want).nan_to_num(0.0).abs()
    step = 132 * 2.0**-13 if device == "cuda" else (128 + heads + 2) * 2.0**-24
    assert (error <= bound.nan_to_num(posinf=0.0, neginf=0.0) * step + 1e-30).all()
    ids = winnow.select(got, topk, starts=starts, ends=ends)
    assert torch.equal(ids.cpu(), reference.select(got.cpu(), topk, cpu[4], cpu[5]))
    at_once = winnow.score_select(
        q, weights, ends, topk, starts=starts, key_rows=rows, key_scales=scales
    )
    assert torch.equal(at_once, ids)


@on("score", "write")
@pytest.mark.parametrize("fmt", ["index_keys", "index_keys_bf16"])
def test_score_paged(device, fmt):
    d = Draw(5, device=device)
    cache, rows = d.cache(fmt, 4, 8)
    q = d.bf16(3, 4, 128) if fmt == "index_keys_bf16" else d.e4m3(3, 4, 128)
    weights = d.f32(3, 4)
    table = torch.tensor([[2, 0], [3, -1]], dtype=INT, device=device)
    requests = torch.tensor([0, 1, 0], dtype=INT, device=device)
    ends = torch.tensor([16, 10, 5], dtype=INT, device=device)
    got = winnow.score(
        q, weights, ends, keys=cache, block_table=table, requests=requests, clean=True
    )
    assert got.shape == (3, 16)
    pages = {"keys": cache, "block_table": table, "requests": requests}
    ids = winnow.score_select(q, weights, ends, 4, **pages)
    assert torch.equal(ids, winnow.select(got, 4, ends=ends))
    op = torch.ops.winnow.score(q, weights, ends, **{**pages, "keys": cache.data}, page=8, width=16)
    assert torch.equal(op, got)
    q, weights, table, got = q.cpu(), weights.cpu(), table.cpu(), got.cpu()
    for t in range(3):
        pages = table[requests[t]]
        keys = torch.cat(
            [rows[p * 8 : p * 8 + 8] if p >= 0 else rows[:8] * float("nan") for p in pages]
        )
        want = (weights[t].double()[:, None] * (q[t].double() @ keys.T).clamp_min(0)).sum(0)
        want[torch.isnan(keys[:, 0])] = -reference.INF
        want[ends[t] :] = -reference.INF
        # Hopper adds fp8 products with 14 bits: 2^-13 of 128 terms of about unit size each.
        atol = 1e-4 if device == "cpu" else 128 * 2**-13 * weights[t].abs().sum().item()
        torch.testing.assert_close(got[t].double(), want, rtol=1e-4, atol=atol)


@on("locate")
@cases()
@given(shapes, st.integers(1, 5), st.integers(0, 12), st.integers(1, 9))
def test_locate(device, start, tokens, topk, page):
    d = Draw(*start, device)
    ids, requests = d.ints(-2, 40, tokens, topk), d.ints(-1, 4, tokens)
    table = d.ints(-2, 9, 3, 4)
    slots, counts = winnow.locate(ids, requests, table, page=page, pages=6, counts=True)
    want = reference.locate(ids.cpu(), requests.cpu(), table.cpu(), page, 6)
    assert torch.equal(slots.cpu(), want)
    assert torch.equal(counts.cpu(), (want >= 0).sum(1).to(INT))


@on("write", "gather")
@cases()
@given(shapes, st.sampled_from(LATENT), st.integers(1, 9))
def test_write_and_gather(device, start, fmt, page):
    d = Draw(*start, device)
    cache, rows = d.cache(fmt, 4, page)
    table = torch.tensor([[3, 0], [1, 2]], dtype=INT, device=device)
    lengths = torch.tensor([page + 1, page], dtype=INT, device=device)
    starts = torch.tensor([page - 1, 0], dtype=INT, device=device)
    total = int(lengths.sum())
    got = winnow.gather(cache, table, lengths, starts=starts, rows=total)
    ids = torch.cat([torch.arange(page - 1, 2 * page), torch.arange(page)])
    owner = torch.tensor([0] * (page + 1) + [1] * page)
    slots = table.cpu()[owner, ids // page] * page + ids % page
    assert torch.equal(got.cpu(), rows[slots].bfloat16())


@on("absorb")
@cases(8)
@given(shapes, st.integers(1, 6), st.integers(1, 9), st.integers(1, 40), st.integers(1, 33))
def test_absorb(device, start, tokens, heads, latent, p):
    d = Draw(*start, device)
    weight = d.bf16(heads, p + 7, latent).permute(2, 0, 1)
    w_uk, w_uv = winnow.split_kv_b(weight, p)
    assert torch.equal(w_uk, weight[..., :p]) and torch.equal(w_uv, weight[..., p:])
    q, attn, rows = (
        d.bf16(tokens, heads, p),
        d.bf16(tokens, heads, latent),
        d.bf16(tokens, latent + 3),
    )
    products = [
        (winnow.absorb_query(q, w_uk), "thp,lhp->thl", q, w_uk),
        (winnow.project_output(attn, w_uv), "thl,lhv->thv", attn, w_uv),
    ]
    k, v = winnow.decompress(rows, w_uk, w_uv)
    assert torch.equal(k[..., p:], rows[:, None, latent:].expand(-1, heads, -1))
    products += [(k[..., :p], "tl,lhp->thp", rows[:, :latent], w_uk)]
    products += [(v, "tl,lhv->thv", rows[:, :latent], w_uv)]
    for got, equation, a, b in products:
        want = torch.einsum(equation, a.double(), b.double())
        # fp32 sums of up to 40 products, then one rounding to bf16
        bound = torch.einsum(equation, a.double().abs(), b.double().abs()) * 64 * 2**-24
        assert ((got.double() - want).abs() <= bound * 2 + want.abs() * BF16_STEP).all()


@on("quantize", "join", "dequantize_weight")
@cases(8)
@given(shapes, st.integers(1, 150), st.integers(1, 140))
def test_quantisers(device, start, rows, cols):
    d = Draw(start[0], device=device)
    weight, scale = d.e4m3(rows, cols), d.f32(-(-rows // 128), -(-cols // 128))
    got = winnow.dequantize_weight(weight, scale)
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    assert torch.equal(got, (weight.float() * wide).bfloat16())
    x = d.f32(rows, cols)
    q, s = winnow.quantize(x)
    factor = 448 / x.abs().max().clamp_min(1e-10)
    assert q.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(s, (1 / factor).view(1), rtol=2**-22, atol=0)  # two roundings
    want = (x * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    both = winnow.join(d.bf16(2, 3, 8), d.bf16(2, 3, 4))
    assert both.shape == (2, 3, 12)


@on("mask", "mha", "lists")
def test_masks_and_lists(device):
    def ints(values):
        return torch.tensor(values, dtype=INT, device=device)

    ids = ints([[0, 9, 9, -1], [3, 11, 200, 8]])
    mask = winnow.topk_mask(ids, 12, lengths=ints([12, 9]))
    bits = np.unpackbits(mask.cpu().numpy(), axis=1, bitorder="little")
    assert [list(np.flatnonzero(row)) for row in bits] == [[0, 9], [3, 8]]
    d = Draw(1, device=device)
    q, k, v = d.bf16(2, 3, 16), d.bf16(12, 3, 16), d.bf16(12, 3, 8)
    by_bits = winnow.attend_mha(q, k, v, bits=mask, scale=0.2)
    as_bytes = torch.from_numpy(bits[:, :12].copy()).to(device)
    by_bytes = winnow.attend_mha(q, k, v, mask=as_bytes, scale=0.2)
    assert torch.equal(by_bits, by_bytes)
    positions, requests = ints([255, 511, 383, 639]), ints([0, 1, 0, 1])
    width = winnow.c128a_width(639)
    lists, lengths = winnow.c128a_lists(
        positions, requests, ints([[3], [5]]), width=width, page=512, pages=6, decode_tokens=2
    )
    assert width == 128 and lists.shape == (4, 128) and lengths.tolist() == [2, 4, 3, 5]
    assert lists[0, :3].tolist() == [1536, 1537, -1]
    assert lists[3, :6].tolist() == [0, 1, 2, 3, 4, -1]
    windows, n = winnow.window_lists(ints([1, 5]), window=4)
    assert windows.tolist() == [[0, 1, -1, -1], [2, 3, 4, 5]] and n.tolist() == [2, 4]
    slots = winnow.compressed_slots(ints(range(240, 280)), ints([0] * 40), ints([[5, 7]]), pages=8)
    assert slots[slots >= 0].tolist() == [380, 381, 382, 383, 448, 449, 450, 451, 452, 453]
    arguments = [ints(x) for x in ([[0, 1, -1]], [8], [0], [9], [5])]
    got, n = winnow.combined_lists(*arguments, compressed=2, rows=7, window=4)
    assert n.tolist() == [6] and got[0, :7].tolist() == [0, 1, 3, 4, 5, 6, -1]


@pytest.mark.parametrize("library", ["numpy", "numpy without ml_dtypes"])
def test_numpy_gives_numpy(library, monkeypatch):
    """The same bits from NumPy arrays, read-only ones included; results are NumPy's."""
    d = Draw(1)
    kv, q, indices = d.bf16(20, 512), d.bf16(2, 3, 512), d.ints(-1, 20, 2, 6)
    want = winnow.attend(q, winnow.Cache(kv, "v4_bf16"), indices, scale=576**-0.5)

    def array(x):
        bits = x.contiguous().view(torch.int16).numpy().view(np.uint16)
        bits = bits if "without" in library else bits.view(ml_dtypes.bfloat16)
        bits.flags.writeable = False
        return bits

    got = winnow.attend(
        array(q), winnow.Cache(array(kv), "v4_bf16"), indices.numpy(), scale=576**-0.5
    )
    assert isinstance(got, np.ndarray) and got.dtype == ml_dtypes.bfloat16
    assert np.array_equal(got.view(np.uint16), want.view(torch.int16).numpy().view(np.uint16))
    out = np.zeros((2, 3, 512), np.uint16)
    assert (
        winnow.attend(
            array(q), winnow.Cache(array(kv), "v4_bf16"), indices.numpy(), out=out, scale=576**-0.5
        )
        is out
    )
    assert np.array_equal(out, got.view(np.uint16))
