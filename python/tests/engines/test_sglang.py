"""winnow's hooks in SGLang's real hook registry, FlashMLA interface and indexer.

The kernels below that interface come from a wheel for CUDA; here a module that refuses every call
stands in its place, so that a call which is answered was answered by winnow.
"""

import math
import sys
import types

import pytest
import sglang
import torch

import winnow
from winnow.engines import sglang as plugin


@pytest.fixture
def interface(monkeypatch):
    """SGLang's interface with winnow's hooks applied, and what reached the kernels below."""
    below = types.ModuleType("flash_mla")
    below.__path__ = []
    reached = []

    def refuse(name):
        def function(*args, **kwargs):
            reached.append((name, kwargs))
            return name

        return function

    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_metadata"):
        setattr(below, name, refuse(name))
    schedule = types.ModuleType("flash_mla.flash_mla_interface")
    schedule.FlashMLASchedMeta = type("FlashMLASchedMeta", (), {})
    below.fused_norm_rope_attn_rope_cast = types.ModuleType("flash_mla.mega")
    monkeypatch.setitem(sys.modules, "flash_mla", below)
    monkeypatch.setitem(sys.modules, schedule.__name__, schedule)
    monkeypatch.delitem(sys.modules, plugin._INTERFACE, raising=False)
    monkeypatch.delitem(sys.modules, plugin._INDEXER, raising=False)
    monkeypatch.delenv("WINNOW_SGLANG", raising=False)
    monkeypatch.setattr(plugin, "_kernels_refused", lambda: "")
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.reset()
    assert plugin.register() is True
    HookRegistry.apply_hooks()
    yield sys.modules[plugin._INTERFACE], reached
    HookRegistry.reset()
    sys.modules.pop(plugin._INTERFACE, None)
    sys.modules.pop(plugin._INDEXER, None)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(128, 576, generator=generator).bfloat16()
    cache = torch.zeros(2, 64, 1, 656, dtype=torch.uint8)
    winnow.write(rows, torch.arange(128), winnow.Cache(cache, "v32_fp8"))
    q = torch.randn(3, 1, 16, 576, generator=generator).bfloat16()
    indices = torch.randint(0, 128, (3, 1, 40), generator=generator, dtype=torch.int32)
    return q, cache, rows, indices


@pytest.mark.parametrize("name", [None, "V32"])
def test_decode(interface, problem, name):
    module, reached = interface
    q, cache, _, indices = problem
    schedule = module.FlashMLASchedMeta()
    out, lse = module.flash_mla_with_kvcache(
        *(q, cache, None, None, 512, schedule),
        is_fp8_kvcache=True,
        indices=indices,
        kv_format=name,
    )
    want, want_lse = winnow.attend(
        q[:, 0], winnow.Cache(cache, "v32_fp8"), indices[:, 0], scale=576**-0.5, lse=True
    )
    assert not reached
    assert torch.equal(out[:, 0], want) and torch.equal(lse[:, :, 0], want_lse)


@pytest.mark.parametrize("use_legacy", [True, False])
def test_prefill(interface, problem, use_legacy):
    module, reached = interface
    q, _, rows, indices = problem
    out, max_logits, lse = module.flash_mla_sparse_fwd(
        q[:, 0], rows[:, None], indices, 0.05, use_legacy=use_legacy
    )
    want, want_lse, want_max = winnow.attend(
        q[:, 0],
        winnow.Cache(rows, "v32_bf16"),
        indices[:, 0],
        scale=0.05,
        lse=True,
        max_logit=True,
    )
    base = math.log2(math.e) if use_legacy else 1
    assert not reached and torch.equal(out, want)
    torch.testing.assert_close(lse, want_lse * base)
    torch.testing.assert_close(max_logits, want_max * base)


def test_calls_of_others(interface, problem):
    """Dense calls, scaled queries, other records and formats reach SGLang's kernels, whole."""
    module, reached = interface
    q, cache, _, indices = problem
    schedule = module.FlashMLASchedMeta()
    first = (q, cache, None, None, 512, schedule)
    one = torch.ones(1)
    module.flash_mla_with_kvcache(*first, is_fp8_kvcache=True)
    module.flash_mla_with_kvcache(
        *first, is_fp8_kvcache=True, indices=indices, descale_q=one, descale_k=one
    )
    module.flash_mla_with_kvcache(
        *first, is_fp8_kvcache=True, indices=indices, kv_format="V41", use_legacy=False
    )
    module.flash_mla_with_kvcache(
        q, cache[..., :528], None, None, 512, schedule, is_fp8_kvcache=True, indices=indices
    )
    assert [name for name, _ in reached] == ["flash_mla_with_kvcache"] * 4
    assert reached[1][1]["descale_q"] is one
    assert reached[2][1]["kv_format"] == "V41" and reached[2][1]["use_legacy"] is False


@pytest.fixture
def indexer(interface):
    return sys.modules[plugin._INDEXER]


@pytest.fixture
def queries():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(6, 64, 128, generator=generator).to(torch.float8_e4m3fn)
    return q, torch.rand(6, 64, generator=generator)


def plain_logits(q, weights, keys, scales):
    return (torch.relu(q.float() @ keys.float().T) * weights[:, None]).sum(0) * scales


def test_logits_of_pages(indexer, queries):
    """Decodes; then two tokens a request, given by its last token or by each."""
    q, weights = queries
    generator = torch.Generator().manual_seed(2)
    cache = torch.zeros(9, 64, 1, 132, dtype=torch.uint8)
    flat = cache.view(9, -1)
    rows = torch.randn(9 * 64, 128, generator=generator).bfloat16()
    winnow.write(rows, torch.arange(9 * 64), winnow.Cache(flat, "index_keys", 64), scale="pow2")
    keys = flat[:, : 64 * 128].reshape(9, 64, 128).view(torch.float8_e4m3fn)
    scales = flat[:, 64 * 128 :].contiguous().view(torch.float32)
    tables = torch.stack([torch.randperm(9, generator=generator)[:3] for _ in range(6)]).int()
    lengths = [1, 64, 65, 190, 100, 3]
    by_token = torch.tensor(lengths).int()
    pairs, by_request = torch.tensor([[63, 64], [189, 190], [2, 3]]).int(), [1, 3, 5]
    last = pairs[:, 1].contiguous()
    for shape, visible, table in (
        ((6, 1), by_token[:, None], tables),
        ((6, 1), by_token, tables),
        ((3, 2), pairs, tables[by_request]),
        ((3, 2), last, tables[by_request]),
    ):
        got = indexer.resolve_fp8_paged_mqa_logits_fn()(
            *[q.view(*shape, 64, 128), cache, weights, visible, table, None, 190],
            clean_logits=False,
        )
        assert got.shape == (6, 190) and got.stride(0) % 4 == 0
        for token in range(6):
            end = lengths[token] if shape == (6, 1) else pairs.flatten()[token].item()
            pages = table[token // shape[1]].long()
            want = plain_logits(
                q[token],
                weights[token],
                keys[pages].flatten(0, 1)[:end],
                scales[pages].flatten()[:end],
            )
            assert ((got[token, :end] - want).abs() <= 2**-16 * want.abs().max()).all()


def test_logits_of_rows(indexer, queries):
    """Prefills, beside SGLang's own PyTorch code too, whose products are rounded to bf16."""
    q, weights = queries
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(90, 128, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(90, generator=generator)
    starts = torch.tensor([0, 0, 5, 40, 40, 89], dtype=torch.int32)
    ends = torch.tensor([1, 90, 5, 60, 90, 90], dtype=torch.int32)
    more = (q, (keys, scales), weights, starts, ends)
    got = indexer.resolve_fp8_mqa_logits_fn()(*more, clean_logits=False)
    theirs = indexer._fp8_mqa_logits_torch(*more)
    assert got.shape == (6, 90) and got.stride(0) % 4 == 0
    for token, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start == end:
            continue
        row = got[token, start:end]
        want = plain_logits(q[token], weights[token], keys[start:end], scales[start:end])
        assert ((row - want).abs() <= 2**-16 * want.abs().max()).all()
        assert ((row - theirs[token, start:end]).abs() <= 2**-8 * want.abs().max()).all()


def test_logits_of_others(interface, indexer, queries, monkeypatch):
    """Other formats and a list of blocks reach DeepGEMM."""
    q, weights = queries
    below = types.ModuleType("deep_gemm")
    below.fp8_paged_mqa_logits = lambda *args, **kwargs: ("paged", kwargs)
    below.fp8_mqa_logits = lambda *args, **kwargs: ("rows", kwargs)
    monkeypatch.setitem(sys.modules, "deep_gemm", below)
    cache = torch.zeros(1, 64, 1, 68, dtype=torch.uint8)
    table = torch.zeros(6, 1, dtype=torch.int32)
    ends = torch.ones(6, dtype=torch.int32)
    paged = indexer.resolve_fp8_paged_mqa_logits_fn()
    assert paged(q[:, None], cache, weights, ends, table, None, 64)[0] == "paged"
    cache = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
    got = paged(q[:, None], cache, weights, ends, table, None, 64, indices=table)
    assert got == ("paged", {"indices": table})
    rows = indexer.resolve_fp8_mqa_logits_fn()
    assert rows(q.bfloat16(), None, weights, ends, ends, clean_logits=False)[0] == "rows"


def test_declines(monkeypatch, caplog):
    monkeypatch.delenv("WINNOW_SGLANG", raising=False)
    assert plugin.register() is False
    assert "has no attention kernel for cuda" in caplog.text
    caplog.clear()
    monkeypatch.setattr(sglang, "__version__", "9.9.9")
    assert plugin.register() is False
    assert "SGLang 9.9.9 was never tried" in caplog.text
    caplog.clear()
    monkeypatch.setenv("WINNOW_SGLANG", "off")
    assert plugin.register() is False
    assert "winnow: not used: WINNOW_SGLANG: expected 0 or 1, found off" in caplog.text
    caplog.clear()
    monkeypatch.setenv("WINNOW_SGLANG", "0")
    assert plugin.register() is False and not caplog.text
