"""vLLM's sparse MLA attention by winnow: one attend() a step, straight from vLLM's pages.

vLLM's own classes pad the heads, join the two halves of the queries, translate the indexer's ids
into slots, split the batch into decodes and prefills, and copy an fp8 cache into a bf16 workspace
for the prefills. winnow.attend() takes any number of heads, the halves as they are, and the ids
with vLLM's block table, from either cache format; so all of that is left out. What stays is vLLM's
dense attention for prompts no longer than the top-k (dense.py).

Only imported while vLLM looks for a backend: importing it imports vLLM's sparse classes.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

import winnow
from winnow.engines.vllm.dense import DensePrefills, topk_of
from winnow.engines.vllm.tokens import fill_tokens

# Bytes of a V3.2 fp8 record: 512 e4m3 values, 4 f32 scales, 64 bf16 RoPE values.
_FP8_RECORD = winnow.page_bytes_used("v32_fp8", 1)
_LATENT, _ROPE = 512, 64


def refused() -> str:
    """Why vLLM's own classes should serve the model that is being loaded; "" if winnow's can."""
    device = current_platform.device_type
    stages = {k.stage for k in winnow.support() if k.device == device and k.available}
    if "attend" not in stages:
        return f"this build of winnow has no attention kernel for {device}"
    capability = current_platform.get_device_capability()
    if capability is not None and capability.major != 9:
        return f"winnow has kernels for compute capability 9.0, not {capability.as_version_str()}"
    config = get_current_vllm_config_or_none()
    model = config.model_config if config is not None else None
    if model is None or not hasattr(model.hf_text_config, "index_topk"):
        # No model, or one without sparse attention, for which vLLM refuses either class.
        return ""
    if model.dtype != torch.bfloat16:
        return f"winnow computes in bfloat16, the model in {model.dtype}"
    if config.cache_config.cache_dtype == "nvfp4_ds_mla":
        return "winnow has no nvfp4_ds_mla cache"
    if config.parallel_config.prefill_context_parallel_size > 1:
        return "winnow knows no prefill context parallelism"
    if getattr(config.attention_config, "hisparse_config", None) is not None:
        return "winnow reads no cache in host memory (HiSparse)"
    return ""


@dataclasses.dataclass
class WinnowSparseMetadata(AttentionMetadata):
    """What vLLM's MLA layer and the implementation below read. vLLM sends tokens of "decodes" to
    forward_mqa(), so every token counts as one that dense attention does not serve."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int
    topk_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode_max_query_len: int
    cp_kv_cache_interleave_size: int
    num_prefills: int = 0
    prefill_max_seq_len: int = 0
    decode: None = None
    # vLLM's description of the prefills that dense attention serves.
    prefill: object = None


class WinnowSparseMetadataBuilder(AttentionMetadataBuilder):
    # The same calls with the same addresses for every batch: all of them can be captured.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    # Decodes and prefills may stand in any order, unless dense attention serves the latter.
    reorder_batch_threshold = None

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.topk_tokens = topk_of(vllm_config.model_config)
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.requests = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.dense = DensePrefills(kv_cache_spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold = self.dense.threshold

    def build_for_cudagraph_capture(self, common_attn_metadata):
        # A graph is replayed for longer prompts as well, which are sparse.
        return self._build(common_attn_metadata)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        built = self._build(common_attn_metadata)
        dense = self.dense.build(common_attn_metadata)
        if dense is not None:
            built.num_decodes, built.num_prefills = dense.num_decodes, dense.num_prefills
            built.num_decode_tokens = dense.num_decode_tokens
            built.prefill, built.prefill_max_seq_len = dense.prefill, dense.prefill_max_seq_len
        return built

    def _build(self, common):
        fill_tokens(common, self.requests)
        return WinnowSparseMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            req_id_per_token=self.requests[: common.num_actual_tokens],
            seq_lens=common.seq_lens,
            block_size=self.kv_cache_spec.block_size,
            topk_tokens=self.topk_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            decode_max_query_len=common.max_query_len,
            cp_kv_cache_interleave_size=self.interleave,
        )


def pages(kv_cache: torch.Tensor) -> winnow.Cache:
    """vLLM's cache [blocks, block, record], with any stride between blocks, as winnow's."""
    record = kv_cache.shape[-1] * kv_cache.element_size()
    if record == _FP8_RECORD:
        return winnow.Cache(kv_cache.view(torch.uint8), "v32_fp8")
    # Without RoPE (GLM's NoPE layers) a bf16 row is the latent alone, as in V4.
    rows = {_LATENT + _ROPE: "v32_bf16", _LATENT: "v4_bf16"}
    if kv_cache.dtype != torch.bfloat16 or kv_cache.shape[-1] not in rows:
        raise ValueError(
            f"winnow: kv_cache: expected records of {_FP8_RECORD} bytes, or of "
            f"{' or '.join(map(str, rows))} bfloat16, found {kv_cache.shape[-1]} {kv_cache.dtype}"
        )
    return winnow.Cache(kv_cache, rows[kv_cache.shape[-1]])


def planar_pages(kv_cache: torch.Tensor, name: str) -> winnow.Cache:
    """vLLM's [blocks, block, record] bytes, with any stride between blocks, as winnow's pages of a
    format whose scales stand behind the values of the whole page."""
    blocks, page, record = kv_cache.shape
    flat = kv_cache.as_strided((blocks, page * record), (kv_cache.stride(0), 1))
    return winnow.Cache(flat, name, page)


class WinnowSparseImpl(SparseMLACommonImpl[WinnowSparseMetadata]):
    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_quant_query_input: bool = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # vLLM's workspace for contexts is too narrow for fp8 records of a model without RoPE.
        without_rope = self.kv_cache_dtype == "fp8_ds_mla" and self.qk_rope_head_dim == 0
        self.supports_dense_mha_prefill = not without_rope

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        nope, rope = q if isinstance(q, tuple) else (q[..., :_LATENT], q[..., _LATENT:])
        tokens = nope.shape[0]
        cache = pages(kv_c_and_k_pe_cache)
        if rope.shape[-1] == 0:
            # An fp8 record has a RoPE part, which is zero here.
            with_rope = cache.format.startswith("v32")
            rope = nope.new_zeros(*nope.shape[:-1], _ROPE) if with_rope else None
        ids = self.topk_indices_buffer[:tokens]
        requests = attn_metadata.req_id_per_token[:tokens]
        table = {"block_table": attn_metadata.block_table, "requests": requests}
        if self.dcp_world_size > 1:
            # The indexer gives ids of the whole context; this rank has a share of it.
            ids = winnow.locate(
                ids,
                requests,
                attn_metadata.block_table,
                page=attn_metadata.block_size,
                pages=kv_c_and_k_pe_cache.shape[0],
                world=self.dcp_world_size,
                rank=self.dcp_rank,
                interleave=attn_metadata.cp_kv_cache_interleave_size,
            )
            table = {}
        got = winnow.attend(
            nope,
            cache,
            ids,
            q_rope=rope,
            scale=self.scale,
            lse=self.need_to_return_lse_for_decode,
            # What ranks without one of the ids contribute to the merge: nothing.
            empty_lse_negative=True,
            **table,
        )
        return got if self.need_to_return_lse_for_decode else (got, None)


class WinnowSparse:
    """What winnow's backends change about vLLM's of the same name. The names stay: vLLM chooses
    cache formats by them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]

    @staticmethod
    def get_impl_cls():
        return WinnowSparseImpl

    @staticmethod
    def get_builder_cls():
        return WinnowSparseMetadataBuilder
