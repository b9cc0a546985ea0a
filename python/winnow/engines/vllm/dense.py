"""Prompts no longer than the top-k, for which sparse attention is dense: vLLM's own dense path.

Such a prompt attends to everything before it. Dense attention over the step's keys, with a head's
own 192 values instead of 576 shared ones, then takes fewer products, and reads the keys before they
are rounded to an fp8 cache. vLLM's MLA layer runs it where the metadata has prefills, so winnow's
builder names prefills in steps whose prompts are all that short, and only there.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonMetadataBuilder

_log = logging.getLogger("vllm.winnow")

# Prompts of at most this many new tokens count as decodes, as in vLLM's own sparse backends: for
# 64 heads or more, and for fewer.
_MANY_HEADS, _DECODE_TOKENS, _DECODE_TOKENS_OF_FEW_HEADS = 64, 256, 128
# Prompts of the top-k whose contexts fit into the workspace at a time.
_CONTEXTS = 8


def topk_of(model) -> int:
    """How many tokens a model's indexer chooses. vLLM's own builders read the one configuration or
    the other, by version."""
    text = model.hf_text_config
    return (text if hasattr(text, "index_topk") else model.hf_config).index_topk


class _TheirBuilder(SparseMLACommonMetadataBuilder):
    """vLLM's builder, for what it says about prefills. Its workspace, into which the contexts of
    chunked prompts are gathered, is made for contexts below the top-k."""

    metadata_cls = SimpleNamespace

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        heads = self.model_config.get_num_attention_heads(vllm_config.parallel_config)
        threshold = _DECODE_TOKENS if heads >= _MANY_HEADS else _DECODE_TOKENS_OF_FEW_HEADS
        self._init_reorder_batch_threshold(threshold, supports_spec_as_decode=True)

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config):
        base = SparseMLACommonMetadataBuilder
        theirs = base.determine_chunked_prefill_workspace_size(vllm_config)
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        # A page for each prompt that a step may have.
        prompts = scheduler.max_num_batched_tokens // _DECODE_TOKENS_OF_FEW_HEADS + 1
        ours = max(
            _CONTEXTS * topk_of(model),
            prompts * vllm_config.cache_config.block_size,
        )
        return min(theirs, ours)

    def _build_req_id_per_token(self, common_attn_metadata):
        # winnow's builder has them.
        return None


class DensePrefills:
    """Which tokens of a step vLLM's dense attention should serve."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self._builder = None
        layer = vllm_config.compilation_config.static_forward_context.get(layer_names[0])
        # A layer has no such attention on a CPU, and where vLLM finds no kernels for it.
        if getattr(layer, "prefill_backend", None) is None:
            return
        if vllm_config.attention_config.sparse_mla_force_mqa:
            return
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return
        try:
            self._builder = _TheirBuilder(kv_cache_spec, layer_names, vllm_config, device)
        except Exception as error:
            _log.warning("winnow: no dense prefills: %s: %s", type(error).__name__, error)

    @property
    def threshold(self) -> int | None:
        """New tokens up to which a request counts as a decode; vLLM puts these first."""
        return self._builder.reorder_batch_threshold if self._builder is not None else None

    def build(self, common) -> SimpleNamespace | None:
        """vLLM's metadata of a step that has prompts, all of them no longer than the top-k; None
        for any other step. Needs no word from the device."""
        if self._builder is None or common.max_query_len <= self.threshold:
            return None
        starts, lengths = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
        if lengths is None:
            return None
        first = int((torch.diff(starts) > self.threshold).int().argmax())
        if int(lengths[first : common.num_reqs].max()) > self._builder.topk_tokens:
            return None
        return self._builder.build(0, common)
