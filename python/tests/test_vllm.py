"""The vLLM plugin, against stand-ins for the three vLLM modules that it touches."""

import importlib.metadata
import sys
import types

import pytest
import torch

import winnow
import winnow.vllm
from conftest import on


class TheirImpl:
    softmax_scale = 0.1

    def _fp8_flash_mla_kernel(self, *args):
        return "theirs"

    def _bf16_flash_mla_kernel(self, *args, **kwargs):
        return "theirs"


class TheirBackend:
    @staticmethod
    def get_name():
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_impl_cls():
        return TheirImpl


@pytest.fixture
def vllm(monkeypatch):
    """Registered backends: name -> path."""
    registered = {}
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = types.SimpleNamespace(FLASHMLA_SPARSE="FLASHMLA_SPARSE")
    registry.register_backend = registered.__setitem__
    sparse = types.ModuleType("vllm.v1.attention.backends.mla.flashmla_sparse")
    sparse.FlashMLASparseImpl, sparse.FlashMLASparseBackend = TheirImpl, TheirBackend
    modules = ["vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"]
    for name in [*modules, "vllm.v1.attention.backends.mla"]:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setitem(sys.modules, sparse.__name__, sparse)
    winnow.vllm._backend_class.cache_clear()
    yield registered
    winnow.vllm._backend_class.cache_clear()


def test_without_vllm(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert winnow.vllm.register() is False


def test_switch(vllm, monkeypatch):
    monkeypatch.setenv("WINNOW_VLLM", "0")
    assert winnow.vllm.register() is False and not vllm


def test_entry_point():
    try:
        points = importlib.metadata.distribution("winnow").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    (point,) = [p for p in points if p.group == "vllm.general_plugins"]
    assert point.load() is winnow.vllm.register


@on("attend", "write")
def test_kernels(vllm, device):
    assert winnow.vllm.register() is True
    assert vllm == {"FLASHMLA_SPARSE": "winnow.vllm.WinnowSparseBackend"}
    backend = winnow.vllm.WinnowSparseBackend
    assert backend.get_name() == "FLASHMLA_SPARSE"
    impl = backend.get_impl_cls()()
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(16, 576, generator=g).bfloat16().to(device)
    memory = torch.zeros(winnow.cache_shape("v32_fp8", 2, 8), dtype=torch.uint8, device=device)
    cache = winnow.Cache(memory, "v32_fp8", 8)
    winnow.write(rows, torch.arange(16, device=device), cache)
    q = torch.randn(2, 1, 12, 576, generator=g).bfloat16().to(device)
    slots = torch.tensor([[[3, 9, -1]], [[15, 0, 1]]], dtype=torch.int32, device=device)
    out, lse = impl._fp8_flash_mla_kernel(
        q=q, kv_c_and_k_pe_cache=memory.view(2, 8, 656), topk_indices=slots, kernel_metadata=None
    )
    want, want_lse = winnow.attend(q[:, 0], cache, slots[:, 0], scale=0.1, lse=True)
    assert torch.equal(out[:, 0], want) and torch.equal(lse[:, :, 0], want_lse)
    length = torch.tensor([1, 3], dtype=torch.int32, device=device)
    out, lse = impl._bf16_flash_mla_kernel(q[:, 0], rows.view(2, 8, 576), slots[:, 0], length, 10)
    flat = winnow.Cache(rows, "v32_bf16")
    want = winnow.attend(q[:, 0, :10], flat, slots[:, 0], scale=0.1, lengths=length)
    assert torch.equal(out, want) and lse.shape == (2, 10)
    other = torch.zeros(2, 8, 352, dtype=torch.uint8, device=device)
    assert impl._fp8_flash_mla_kernel(q, other, slots, None) == "theirs"
    assert impl._bf16_flash_mla_kernel(q[:, 0], other, slots[:, 0]) == "theirs"
