"""winnow in SGLang: FlashMLA's two sparse functions and DeepGEMM's logits by winnow.

SGLang calls ``register`` at the start of each of its processes, through the entry point
``sglang.srt.plugins`` of the installed package, and then applies the hooks that it registered.
``WINNOW_SGLANG=0`` leaves SGLang alone. Calls that are not winnow's (dense ones, other records,
fp8 queries) go to the function that SGLang has.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import re

from winnow.engines import switches
from winnow.engines.sglang import logits

__all__ = ["register", "version_refused"]

SWITCH = "WINNOW_SGLANG"

_log = logging.getLogger("sglang.winnow")

# The versions of SGLang whose interface the hooks were written against.
_FIRST, _LAST = (0, 5, 23), (0, 5, 23)
_INTERFACE = "sglang.kernels.ops.attention.flash_mla_interface"
_INDEXER = "sglang.srt.layers.attention.dsa.utils"
# Bytes of a record: V3.2 and V4 in fp8.
_FP8_RECORDS = {576: 656, 512: 584}
# Names of records that are winnow's, by head size. SGLang names V3.2's and leaves V4's unnamed.
_FORMATS = {576: (None, "V32"), 512: (None,)}


def version_refused(version: str) -> str:
    """Why winnow stays away from this version of SGLang; "" if it does not."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found and _FIRST <= tuple(int(part) for part in found.groups()) <= _LAST:
        return ""
    return f"SGLang {version} was never tried, only {'.'.join(map(str, _FIRST))}"


def register() -> bool:
    """Called by SGLang. True if the hooks are registered."""
    if importlib.util.find_spec("sglang") is None:
        return False
    refused = switches.refused(SWITCH)
    if not refused and switches.asked(SWITCH) is False:
        return False
    try:
        if not refused:
            refused = version_refused(importlib.import_module("sglang").__version__)
        if not refused:
            refused = _kernels_refused()
        if refused:
            _log.warning("winnow: not used: %s", refused)
            return False
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        for module, hook in (
            (_INTERFACE, flash_mla_with_kvcache),
            (_INTERFACE, flash_mla_sparse_fwd),
            (_INDEXER, logits.resolve_fp8_paged_mqa_logits_fn),
            (_INDEXER, logits.resolve_fp8_mqa_logits_fn),
        ):
            target = f"{module}.{hook.__name__}"
            hooks.HookRegistry.register(target, hook, hooks.HookType.AROUND)
    except Exception as error:
        _log.warning("winnow: not used: %s: %s", type(error).__name__, error)
        return False
    return True


def _kernels_refused() -> str:
    import winnow

    if any(k.stage == "attend" and k.device == "cuda" and k.available for k in winnow.support()):
        return ""
    return "this build of winnow has no attention kernel for cuda, or finds no Hopper GPU"


def _is_sparse_decode(q, k_cache, indices, is_fp8_kvcache, kv_format, scales) -> bool:
    """Whether winnow has what a decode asks for."""
    if indices is None or q.element_size() != 2 or any(x is not None for x in scales):
        return False
    if kv_format not in _FORMATS.get(q.shape[-1], ()):
        return False
    record = k_cache.shape[-1] * k_cache.element_size()
    if is_fp8_kvcache:
        return record == _FP8_RECORDS.get(q.shape[-1])
    return record == 2 * q.shape[-1]


def flash_mla_with_kvcache(
    original,
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    descale_q=None,
    descale_k=None,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
    kv_format=None,
    *,
    use_legacy=True,
):
    """Paged decode, around SGLang's function of this name."""
    from winnow import flash_mla

    rest = {
        "num_splits": num_splits,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "is_fp8_kvcache": is_fp8_kvcache,
        "indices": indices,
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    first = (q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata)
    scales = (descale_q, descale_k)
    if _is_sparse_decode(q, k_cache, indices, is_fp8_kvcache, kv_format, scales):
        return flash_mla.flash_mla_with_kvcache(*first, **rest)
    return original(
        *first,
        descale_q=descale_q,
        descale_k=descale_k,
        kv_format=kv_format,
        use_legacy=use_legacy,
        **rest,
    )


def flash_mla_sparse_fwd(
    original,
    q,
    kv,
    indices,
    sm_scale,
    d_v=512,
    attn_sink=None,
    topk_length=None,
    *,
    use_legacy=True,
):
    """Prefill over contiguous rows, around SGLang's function of this name."""
    from winnow import flash_mla

    arguments = (q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    if q.shape[-1] not in _FP8_RECORDS or kv.shape[-1] != q.shape[-1] or kv.element_size() != 2:
        return original(*arguments, use_legacy=use_legacy)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(*arguments)
    if use_legacy:
        # Logarithms of SGLang's older kernels are to base 2.
        max_logits, lse = max_logits * math.log2(math.e), lse * math.log2(math.e)
    return out, max_logits, lse
