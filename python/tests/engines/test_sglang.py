"""winnow's hooks in SGLang's real hook registry and FlashMLA interface.

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
    monkeypatch.delenv("WINNOW_SGLANG", raising=False)
    monkeypatch.setattr(plugin, "_kernels_refused", lambda: "")
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.reset()
    assert plugin.register() is True
    HookRegistry.apply_hooks()
    yield sys.modules[plugin._INTERFACE], reached
    HookRegistry.reset()
    sys.modules.pop(plugin._INTERFACE, None)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(128, 576, generator=generator).bfloat16()
    cache = torch.zeros(2, 64, 1, 656, dtype=torch.uint8)
    winnow.write(rows, torch.arange(128), winnow.Cache(cache, "v32_fp8"))
    q = torch.randn(3, 1, 16, 576, generator=generator).bfloat16()
    indices = torch.randint(0, 128, (3, 1, 40), generator=generator, dtype=torch.int32)
    return q, cache, rows, indices


def test_decode(interface, problem):
    module, reached = interface
    q, cache, _, indices = problem
    schedule = module.FlashMLASchedMeta()
    out, lse = module.flash_mla_with_kvcache(
        q, cache, None, None, 512, schedule, is_fp8_kvcache=True, indices=indices
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


def test_declines(monkeypatch, caplog):
    monkeypatch.delenv("WINNOW_SGLANG", raising=False)
    assert plugin.register() is False
    assert "has no attention kernel for cuda" in caplog.text
    caplog.clear()
    monkeypatch.setattr(sglang, "__version__", "9.9.9")
    assert plugin.register() is False
    assert "SGLang 9.9.9 was never tried" in caplog.text
    caplog.clear()
    monkeypatch.setenv("WINNOW_SGLANG", "0")
    assert plugin.register() is False and not caplog.text
