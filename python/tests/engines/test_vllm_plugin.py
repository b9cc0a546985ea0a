"""The plugin in the real vLLM: which class is chosen, and that vLLM is never worse off."""

import importlib.metadata

import pytest
import torch
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

NAMES = {"auto": "FLASH_ATTN_MLA_SPARSE", "fp8_ds_mla": "FLASHMLA_SPARSE"}


@pytest.fixture(autouse=True)
def flash_attention(monkeypatch):
    """FlashAttention's MLA kernel is there on a Hopper, which decides about bf16 caches."""
    from vllm.v1.attention.backends.mla import flashattn_mla_sparse

    monkeypatch.setattr(flashattn_mla_sparse, "flash_attn_supports_mla", lambda: True)


@pytest.fixture(autouse=True)
def config():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def chosen(kv_cache_dtype, name=None):
    """The class that vLLM's platform finds for V3.2, by the way that vLLM takes."""
    what = AttentionSelectorConfig(
        head_size=576,
        dtype=torch.bfloat16,
        kv_cache_dtype=kv_cache_dtype,
        block_size=64,
        use_mla=True,
        use_sparse=True,
    )
    backend = AttentionBackendEnum[name] if name else None
    return resolve_obj_by_qualname(
        current_platform.get_attn_backend_cls(backend, what, num_heads=16)
    )


def is_ours(cls):
    return cls.__module__.startswith("winnow.")


@pytest.mark.parametrize("kv_cache_dtype", NAMES)
def test_chosen(plugin, lines, kv_cache_dtype):
    theirs = chosen(kv_cache_dtype)
    assert theirs.get_name() == NAMES[kv_cache_dtype] and not is_ours(theirs)
    assert plugin.register() is True
    ours = chosen(kv_cache_dtype)
    assert is_ours(ours) and issubclass(ours, theirs)
    assert ours.get_name() == theirs.get_name()
    assert is_ours(ours.get_impl_cls()) and is_ours(ours.get_builder_cls())
    assert chosen(kv_cache_dtype, NAMES[kv_cache_dtype]) is ours
    assert not lines
    plugin.unregister()
    assert chosen(kv_cache_dtype) is theirs


def test_asked_for(plugin):
    """FLASHMLA_SPARSE can be asked for with a bf16 cache as well."""
    plugin.register()
    assert is_ours(chosen("auto", "FLASHMLA_SPARSE"))


def test_registers_twice(plugin, lines):
    assert plugin.register() and plugin.register() and not lines
    assert is_ours(chosen("fp8_ds_mla"))


def test_switch(plugin, monkeypatch, lines):
    monkeypatch.setenv("WINNOW_VLLM", "0")
    assert plugin.register() is False and not lines
    assert not is_ours(chosen("fp8_ds_mla"))


@pytest.mark.parametrize("name", ["WINNOW_VLLM", "WINNOW_VLLM_LAYERS"])
@pytest.mark.parametrize("value", ["off", "false", "2", " 0"])
def test_switch_with_another_value(plugin, monkeypatch, lines, name, value):
    """Refused by name. Who writes "off" does not want winnow."""
    monkeypatch.setenv(name, value)
    assert plugin.register() is False
    assert lines == [f"winnow: not used: {name}: expected 0 or 1, found {value}"]
    assert not is_ours(chosen("fp8_ds_mla"))


@pytest.mark.parametrize("value", ["", "1"])
def test_switched_on(plugin, monkeypatch, lines, value):
    monkeypatch.setenv("WINNOW_VLLM", value)
    assert plugin.register() is True and not lines


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0", "dev", ""])
def test_unknown_version(plugin, monkeypatch, lines, version):
    monkeypatch.setattr(vllm, "__version__", version)
    assert plugin.register() is False
    assert lines == [f"winnow: not used: vLLM {version} was never tried, only 0.26 to 0.33"]
    assert not is_ours(chosen("fp8_ds_mla"))


def test_surprise_while_registering(plugin, monkeypatch, lines):
    """The second registration fails: the first is taken back."""
    from vllm.v1.attention.backends import registry

    register, calls = registry.register_backend, []

    def surprising(backend, path):
        calls.append(backend)
        if len(calls) > 1:
            raise KeyError("surprise")
        return register(backend, path)

    monkeypatch.setattr(registry, "register_backend", surprising)
    assert plugin.register() is False
    assert lines == ["winnow: not used: KeyError: 'surprise'"]
    assert len(calls) == 2 and not any(b.is_overridden() for b in calls)


def test_another_plugin_was_first(plugin, lines):
    backend = AttentionBackendEnum.FLASHMLA_SPARSE
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(backend, "another.Backend")
    try:
        assert plugin.register() is False
        assert lines == [
            "winnow: not used: RuntimeError: FLASHMLA_SPARSE is already another.Backend"
        ]
        assert backend.get_path() == "another.Backend"
    finally:
        backend.clear_override()


def test_surprise_while_choosing(plugin, monkeypatch, lines):
    from winnow.engines.vllm import sparse_mla

    def surprising():
        raise KeyError("surprise")

    theirs = chosen("fp8_ds_mla")
    plugin.register()
    monkeypatch.setattr(sparse_mla, "refused", surprising)
    assert chosen("fp8_ds_mla", "FLASHMLA_SPARSE") is theirs
    assert lines == ["winnow: not used for FLASHMLA_SPARSE: KeyError: 'surprise'"]


def test_build_without_kernels(plugin, monkeypatch, lines):
    """A winnow that was built without CUDA, on a machine with a GPU."""
    plugin.register()
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    assert not is_ours(chosen("fp8_ds_mla", "FLASHMLA_SPARSE"))
    assert lines == [
        "winnow: not used for FLASHMLA_SPARSE: "
        "this build of winnow has no attention kernel for cuda"
    ]


def test_entry_point(plugin):
    points = importlib.metadata.distribution("winnow").entry_points
    (point,) = [p for p in points if p.group == "vllm.general_plugins"]
    assert point.load() is plugin.register
