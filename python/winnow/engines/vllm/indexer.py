"""vLLM's indexer by winnow: one score_select() a layer, straight from vLLM's pages of keys.

vLLM's own function gathers the keys of prefills into a workspace, writes the matrix of logits in
pieces that fit into memory, and selects from it, with different kernels for decodes and prefills.
winnow.score_select() reads the pages by the block table and keeps no logits.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as theirs
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV4IndexerBackend,
    DeepseekV32IndexerBackend,
)

import winnow
from winnow.engines.vllm.sparse_mla import planar_pages
from winnow.engines.vllm.sparse_mla import refused as attention_refused
from winnow.engines.vllm.tokens import choose_all, fill_tokens

_log = logging.getLogger("vllm.winnow")

# Bytes of an index key: 128 e4m3 values and an f32 scale.
_RECORD = winnow.page_bytes_used("index_keys", 1)

# vLLM's function, which still serves what winnow's does not.
_their_function = theirs.sparse_attn_indexer


def refused(head_dim: int) -> str:
    """Why vLLM's own indexer should serve the layer that is being made; "" if winnow's can."""
    config = get_current_vllm_config_or_none()
    if config is not None and config.parallel_config.decode_context_parallel_size > 1:
        return "winnow does not merge the top-k of context-parallel ranks"
    if head_dim != _RECORD:
        return f"winnow's index keys have {_RECORD} bytes, not {head_dim}"
    # Since 0.33, on GPUs whose products take no other.
    if getattr(theirs, "mqa_logits_use_mx_scales", lambda: False)():
        return "winnow's index keys have an f32 scale, vLLM's have ue8m0 scales here"
    return attention_refused()


def cache_methods(cls: type, ours: type) -> dict:
    """Methods for vLLM's layer that holds a cache of index keys, with winnow's backend for it."""
    initialise, backend = cls.__init__, cls.get_attn_backend

    def __init__(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        # Now, while vLLM's configuration is at hand. Layers derived from this one have an
        # indexer of their own.
        why = refused(self.head_dim) if type(self) is cls else "another layer"
        self.by_winnow = not why
        if why and type(self) is cls:
            _log.warning("winnow: indexer not used for %s: %s", self.prefix, why)

    def get_attn_backend(self):
        return ours if self.by_winnow else backend(self)

    return {"__init__": __init__, "get_attn_backend": get_attn_backend}


@dataclasses.dataclass
class WinnowIndexerMetadata:
    num_actual_tokens: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    # The request of each token, and how many tokens of its context it may see.
    requests: torch.Tensor
    ends: torch.Tensor
    # No token sees more; in a step that a CUDA graph captures, no limit.
    most_visible: float


class WinnowIndexerMetadataBuilder(AttentionMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    reorder_batch_threshold = None

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        # At the same addresses in every step, as a CUDA graph asks for.
        self.requests = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.ends = torch.zeros(tokens, dtype=torch.int32, device=device)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        built = self.build(0, common_attn_metadata)
        built.most_visible = math.inf
        return built

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        tokens = common.num_actual_tokens
        fill_tokens(common, self.requests, self.ends)
        return WinnowIndexerMetadata(
            num_actual_tokens=tokens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            requests=self.requests[:tokens],
            ends=self.ends[:tokens],
            most_visible=common.max_seq_len,
        )


class WinnowIndexerBackend(DeepseekV32IndexerBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @staticmethod
    def get_builder_cls():
        return WinnowIndexerMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls):
        # All lengths are read where vLLM's device has them.
        return True


@dataclasses.dataclass
class WinnowV4IndexerMetadata(WinnowIndexerMetadata):
    """The slots are those of compressed states, and so are the ends. What follows is read by
    vLLM's layer, which asks whether there are more states than it may choose."""

    max_seq_len: int
    num_decode_tokens: int
    num_prefill_tokens: int = 0


class WinnowV4IndexerMetadataBuilder(WinnowIndexerMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        spec = self.kv_cache_spec
        # The name until 0.28, and the one since.
        ratio = spec.compress_ratio if hasattr(spec, "compress_ratio") else spec.tokens_per_state
        slots = winnow.compressed_slots(
            built.ends - 1,
            built.requests,
            built.block_table,
            ratio=ratio,
            page=spec.block_size // ratio,
            # vLLM's table names blocks of a cache that is not known here.
            pages=torch.iinfo(torch.int32).max,
            out=self.slots[: built.num_actual_tokens],
        )
        return WinnowV4IndexerMetadata(
            num_actual_tokens=built.num_actual_tokens,
            slot_mapping=slots,
            block_table=built.block_table,
            requests=built.requests,
            ends=built.ends.floor_divide_(ratio),
            most_visible=built.most_visible // ratio,
            max_seq_len=common_attn_metadata.max_seq_len,
            num_decode_tokens=built.num_actual_tokens,
        )


class WinnowV4IndexerBackend(DeepseekV4IndexerBackend):
    @staticmethod
    def get_builder_cls():
        return WinnowV4IndexerMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls):
        return True


def _is_ours(layer) -> bool:
    return getattr(layer, "by_winnow", False)


def sparse_attn_indexer(
    hidden_states,
    k_cache_prefix,
    kv_cache,
    q_quant,
    q_scale,
    k,
    weights,
    quant_block_size,
    scale_fmt,
    topk_tokens,
    head_dim,
    max_model_len,
    total_seq_lens,
    topk_indices_buffer,
    skip_k_cache_insert,
    *rest,
    **more,
):
    """In place of vLLM's function of this name, both where it is called as an operator and where
    it is called directly. Its further arguments, which differ between versions, are for cases
    that are not winnow's."""
    context = get_forward_context()
    name = theirs._resolve_layer_name(k_cache_prefix)
    if not _is_ours(context.no_compile_layers[name]):
        return _their_function(
            hidden_states,
            k_cache_prefix,
            kv_cache,
            q_quant,
            q_scale,
            k,
            weights,
            quant_block_size,
            scale_fmt,
            topk_tokens,
            head_dim,
            max_model_len,
            total_seq_lens,
            topk_indices_buffer,
            skip_k_cache_insert,
            *rest,
            **more,
        )
    if isinstance(context.attn_metadata, dict):
        built = context.attn_metadata[name]
        keys = planar_pages(kv_cache, "index_keys")
        if not skip_k_cache_insert:
            slots = built.slot_mapping
            scale = "pow2" if scale_fmt == "ue8m0" else "amax"
            winnow.write(k[: slots.shape[0]].contiguous(), slots, keys, scale=scale)
        tokens = built.num_actual_tokens
        ids = topk_indices_buffer[:tokens, :topk_tokens]
        if built.most_visible <= topk_tokens:
            choose_all(built.ends, ids)
        else:
            winnow.score_select(
                q_quant[:tokens],
                weights[:tokens].float(),
                built.ends,
                topk_tokens,
                keys=keys,
                block_table=built.block_table,
                requests=built.requests,
                out=ids,
            )
    # Without metadata vLLM measures how much memory a step takes: nothing, here.
    return topk_indices_buffer


class WinnowSparseAttnIndexer(theirs.SparseAttnIndexer):
    """vLLM's layer around the operator; a CPU takes the operator as well."""

    def forward_cpu(self, hidden_states, q_quant, k, weights):
        if _is_ours(self.k_cache):
            return self.forward_cuda(hidden_states, q_quant, k, weights)
        return super().forward_cpu(hidden_states, q_quant, k, weights)

    def forward_native(self, hidden_states, q_quant, k, weights):
        if _is_ours(self.k_cache):
            return self.forward_cuda(hidden_states, q_quant, k, weights)
        return super().forward_native(hidden_states, q_quant, k, weights)
