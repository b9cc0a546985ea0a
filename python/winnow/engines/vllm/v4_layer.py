"""What stands around the attention of vLLM's DeepSeek V4 by winnow: norm and RoPE of the queries,
the writing of the window's cache, the compressors, and the indexer's queries.

Every function leaves vLLM's caches and tensors as vLLM's own kernels leave them, so each can be
taken or left by itself. On a GPU winnow takes those that are faster than vLLM's, which all are but
the window's; ``WINNOW_VLLM_LAYERS=1`` takes that as well, ``WINNOW_VLLM_LAYERS=0`` takes none.
"""

from __future__ import annotations

import torch
from vllm.forward_context import get_forward_context

import winnow
from winnow.engines.vllm.sparse_mla import planar_pages
from winnow.engines.vllm.tokens import once_a_step

# As vLLM scales V4's records and its index keys.
_RECORD_SCALE, _KEY_SCALE = "pow2_floor_amax", "pow2"


def int32(positions: torch.Tensor) -> torch.Tensor:
    """vLLM's int64 positions of a step's tokens as winnow takes them."""
    return once_a_step("positions", positions.device, positions.int)


def table(rotary) -> torch.Tensor:
    """vLLM's cosines and sines of each position, which its layer keeps in f32, as winnow's."""
    return rotary.cos_sin_cache.view(-1, 2, 32)


def prepare_query_and_write(self, q, kv, positions, attn_metadata):
    """Queries, normalised and rotated; the rotated latents as records of the window's cache."""
    if not isinstance(attn_metadata, dict):
        return q
    slots = attn_metadata[self.swa_cache_layer.prefix].slot_mapping
    tokens, at, angles = slots.shape[0], int32(positions), table(self.rotary_emb)
    winnow.write(
        kv[:tokens],
        slots,
        planar_pages(self.swa_cache_layer.kv_cache, "v4_fp8"),
        scale=_RECORD_SCALE,
        positions=at[:tokens],
        table=angles,
    )
    return winnow.prepare_query(q, at, angles, norm="rms", eps=self.eps)


def prepare_index_query(
    positions,
    index_q,
    index_q_cos_sin_cache,
    index_weights,
    index_weights_softmax_scale,
    index_weights_head_scale,
):
    """The indexer's queries in e4m3, and their weights with the queries' scales in them: vLLM's
    function for it, with its parameters."""
    return winnow.index_query(
        index_q,
        index_weights,
        int32(positions),
        index_q_cos_sin_cache.view(-1, 2, 32),
        factor=index_weights_softmax_scale * index_weights_head_scale,
        scale=_KEY_SCALE,
    )


def _norm_weight(compressor) -> torch.Tensor:
    """The norm's weights in f32, made in the first step, which no graph captures."""
    if not hasattr(compressor, "norm_weight_of_winnow"):
        compressor.norm_weight_of_winnow = compressor.norm.weight.detach().float()
    return compressor.norm_weight_of_winnow


def compress(self, kv_score, positions, rotary_emb):
    """Rows of new tokens into the compressor's state, and the entries that they close into the
    cache of states or of index keys."""
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return
    state = metadata[self.state_cache.prefix]
    tokens = state.slot_mapping.shape[0]
    layer = self._static_forward_context[self.k_cache_prefix]
    keys = self.head_dim == 128
    winnow.compress(
        kv_score[:tokens],
        int32(positions)[:tokens],
        requests=state.token_to_req_indices[:tokens],
        ratio=self.compress_ratio,
        overlap=bool(self.overlap),
        bias=self.ape,
        state=self.state_cache.kv_cache,
        state_table=state.block_table,
        norm_weight=_norm_weight(self),
        eps=self.rms_norm_eps,
        table=table(rotary_emb),
        slots=metadata[self.k_cache_prefix].slot_mapping[:tokens],
        cache=planar_pages(layer.kv_cache, "index_keys" if keys else "v4_fp8"),
        scale=_KEY_SCALE if keys else _RECORD_SCALE,
    )


def attention_methods(cls: type) -> dict:
    """What a step's positions need on a GPU. Backends that winnow does not replace derive from
    vLLM's V4 layer as well and keep vLLM's methods."""
    # What prepares and attends, since 0.28 and before; the positions are its last argument but one.
    name = "_prepare_and_attn" if hasattr(cls, "_prepare_and_attn") else "attention_impl"
    prepare = getattr(cls, name)

    def prepare_and_attend(self, *args):
        if _serves(self):
            # Before vLLM goes on in several streams, each of which reads them.
            int32(args[-2])
        return prepare(self, *args)

    return {name: prepare_and_attend}


def window_methods(cls: type, causal) -> dict:
    """Queries and the writing of a window; drafts that see ahead (``causal(layer, metadata)``)
    keep vLLM's."""
    insert = cls._fused_qnorm_rope_kv_insert

    def _fused_qnorm_rope_kv_insert(self, q, kv, positions, attn_metadata):
        if _serves(self) and isinstance(attn_metadata, dict) and causal(self, attn_metadata):
            return prepare_query_and_write(self, q, kv, positions, attn_metadata)
        return insert(self, q, kv, positions, attn_metadata)

    return {"_fused_qnorm_rope_kv_insert": _fused_qnorm_rope_kv_insert}


def compressor_method(cls: type):
    """forward() for vLLM's compressor: winnow's where it serves the layer that reads the cache."""
    forward = cls.forward

    def run(self, kv_score, positions, rotary_emb):
        if _serves(self._static_forward_context[self.k_cache_prefix]):
            return compress(self, kv_score, positions, rotary_emb)
        return forward(self, kv_score, positions, rotary_emb)

    return run


def index_query_function(theirs):
    """In place of vLLM's function for the indexer's queries."""

    def fused_indexer_q_rope_quant(
        positions,
        index_q,
        index_q_cos_sin_cache,
        index_weights,
        index_weights_softmax_scale,
        index_weights_head_scale,
        *rest,
        **more,
    ):
        given = (
            positions,
            index_q,
            index_q_cos_sin_cache,
            index_weights,
            index_weights_softmax_scale,
            index_weights_head_scale,
        )
        if any(rest) or any(more.values()):
            # MXFP4 keys, and weights in another format for them.
            return theirs(*given, *rest, **more)
        return prepare_index_query(*given)

    return fused_indexer_q_rope_quant


def _serves(layer) -> bool:
    return getattr(layer, "by_winnow", False)
