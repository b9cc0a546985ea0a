"""vLLM on this machine: installed, registered, and whose class it would choose for a model."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os

from winnow.engines import switches
from winnow.engines import vllm as plugin
from winnow.engines.report import Report, is_v4, version_of, why_not_sparse_mla

_GROUP = "vllm.general_plugins"


def report(model: dict | None, kv_cache_dtype: str) -> Report:
    found = Report("vLLM")
    if importlib.util.find_spec("vllm") is None:
        return found
    try:
        found.version = importlib.import_module("vllm").__version__
    except Exception as error:
        found.version = version_of("vllm")
        found.refused = f"vLLM cannot be imported: {type(error).__name__}: {error}"
        return found
    points = [p.value for p in importlib.metadata.entry_points(group=_GROUP, name="winnow")]
    found.facts.append(f"plugin: {points[0] if points else 'no entry point'}")
    found.facts.append(switches.shown(plugin.SWITCH))
    allowed = os.environ.get("VLLM_PLUGINS")
    wrong = switches.refused(*plugin.SWITCHES)
    if wrong:
        found.refused = wrong
    elif switches.asked(plugin.SWITCH) is False:
        found.refused = f"switched off by {plugin.SWITCH}=0"
    elif not points:
        found.refused = f"winnow is not installed as a package: no entry point {_GROUP}"
    elif allowed is not None and "winnow" not in allowed.split(","):
        found.refused = f"VLLM_PLUGINS={allowed} leaves winnow out"
    else:
        found.refused = plugin.version_refused(found.version)
    if not found.refused:
        found.refused = _choice(model, kv_cache_dtype, found.facts)
    return found


def _choice(model: dict | None, kv_cache_dtype: str, facts: list[str]) -> str:
    """Registers as vLLM would and asks vLLM's platform for its backend."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("vllm.winnow")
    log.addHandler(handler)
    try:
        if not plugin.register():
            return lines[-1] if lines else "registering failed"
        from vllm.platforms import current_platform

        if not current_platform.device_type:
            facts.append("platform: none")
            return "vLLM finds no device here that this build of it can use"
        facts.append(f"platform: {current_platform.device_name}")
        refused = why_not_sparse_mla(model) if model is not None else ""
        if refused:
            return refused
        if model is not None and is_v4(model):
            facts.append(switches.shown(plugin.LAYERS_SWITCH))
        if model is None or is_v4(model):
            # V4's layers choose no backend: they are winnow's where its kernels are.
            return importlib.import_module("winnow.engines.vllm.sparse_mla").refused()
        path = _chosen(current_platform, model, kv_cache_dtype)
        facts.append(f"backend: {path}")
        if path.startswith("winnow."):
            return ""
        return lines[-1] if lines else f"vLLM chooses {path}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        log.removeHandler(handler)
        plugin.unregister()


def _chosen(platform, model: dict, kv_cache_dtype: str) -> str:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.selector import AttentionSelectorConfig

    dtype = model.get("dtype") or model.get("torch_dtype") or "bfloat16"
    what = AttentionSelectorConfig(
        head_size=model["kv_lora_rank"] + model.get("qk_rope_head_dim", 64),
        dtype=getattr(torch, dtype),
        kv_cache_dtype=kv_cache_dtype,
        block_size=None,
        use_mla=True,
        use_sparse=True,
    )
    with set_current_vllm_config(VllmConfig()):
        return platform.get_attn_backend_cls(None, what, num_heads=model.get("num_attention_heads"))
