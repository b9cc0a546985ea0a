"""vLLM's CPU platform with sparse MLA, which it does not have by itself."""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

import winnow
from winnow.engines.vllm.sparse_mla import WinnowSparse, WinnowSparseImpl, pages

# As this version of vLLM scales V3.2's fp8 records on a GPU.
_SCALE = "pow2"
# A page of as many tokens as on a GPU, where vLLM's platform would take 16 or 128.
_PAGE = 64


class WinnowCpuSparseImpl(WinnowSparseImpl):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # vLLM has dense prefills of MLA on GPUs only.
        self.supports_dense_mha_prefill = False

    def do_kv_cache_update(
        self,
        kv_c_normed,
        k_pe,
        kv_cache,
        slot_mapping,
        kv_cache_dtype,
        k_scale,
        skip_scale=False,  # since 0.33; neither format has the scale
    ):
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        tokens = slots.shape[0]
        latent, rope = kv_c_normed[:tokens], k_pe[:tokens].reshape(tokens, -1)
        cache = pages(kv_cache)
        fp8 = cache.format.endswith("fp8")
        if rope.shape[1] == 0:
            rope = latent.new_zeros(tokens, 64) if fp8 else None
        winnow.write(latent, slots, cache, rope=rope, scale=_SCALE if fp8 else "default")


class WinnowCpuSparseBackend(WinnowSparse, AttentionBackend):
    supported_kv_cache_dtypes = ["auto", "bfloat16", "fp8_ds_mla", "fp8"]

    @staticmethod
    def get_name():
        # vLLM allocates fp8 records of 656 bytes for this name.
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_impl_cls():
        return WinnowCpuSparseImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls):
        return [576, 512]

    @classmethod
    def is_mla(cls):
        return True

    @classmethod
    def is_sparse(cls):
        return True


def quantise_queries(x, group_size, eps=1e-10, column_major_scales=False, use_ue8m0=True):
    """The indexer's queries as e4m3 with a scale for each group. vLLM has a Triton kernel for it,
    and most CPU machines have no Triton that runs on them."""
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1).clamp_(min=eps) / torch.finfo(torch.float8_e4m3fn).max
    if use_ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    # No value leaves e4m3's range: the scale is at least the largest divided by its maximum.
    quantised = (groups / scale.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return quantised, scale


_their_backend = CpuPlatform.get_attn_backend_cls.__func__
_their_check = CpuPlatform.check_and_update_config.__func__
_their_update = CpuPlatform.update_block_size_for_backend.__func__


def _is_sparse(vllm_config) -> bool:
    model = vllm_config.model_config
    return model is not None and hasattr(model.hf_text_config, "index_topk")


def _is_v4(vllm_config) -> bool:
    return vllm_config.model_config.hf_text_config.model_type == "deepseek_v4"


@classmethod
def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
    what = attn_selector_config
    if what.use_sparse and what.use_mla and what.dtype == torch.bfloat16:
        return f"{__name__}.WinnowCpuSparseBackend"
    return _their_backend(cls, selected_backend, attn_selector_config, num_heads)


@classmethod
def check_and_update_config(cls, vllm_config):
    """vLLM's check, without what it forbids for the sake of its own kernels: other pages than of
    16 tokens (V4 has its own size), chunked prefill and prefix caching."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    page = cache.block_size if cache.user_specified_block_size else _PAGE
    prefix, chunked = cache.enable_prefix_caching, scheduler.enable_chunked_prefill
    tokens = scheduler.max_num_batched_tokens
    _their_check(cls, vllm_config)
    if _is_sparse(vllm_config):
        cache.enable_prefix_caching = prefix
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, tokens
        if not _is_v4(vllm_config):
            cache.block_size = page


@classmethod
def update_block_size_for_backend(cls, vllm_config):
    """Since 0.33 vLLM takes a page of 128 tokens here where all of a model's backends can, which
    winnow's can. The page is the one that was chosen above."""
    page = vllm_config.cache_config.block_size
    _their_update(cls, vllm_config)
    if _is_sparse(vllm_config):
        vllm_config.cache_config.block_size = page


METHODS = {
    "get_attn_backend_cls": get_attn_backend_cls,
    "check_and_update_config": check_and_update_config,
    "update_block_size_for_backend": update_block_size_for_backend,
}
