"""vLLM's backend FLASH_ATTN_MLA_SPARSE, its first choice for bf16 caches on Hopper, by winnow."""

from vllm.v1.attention.backends.mla.flashattn_mla_sparse import FlashAttnMLASparseBackend

from winnow.engines.vllm.sparse_mla import WinnowSparse


class WinnowFlashAttnMLASparseBackend(WinnowSparse, FlashAttnMLASparseBackend):
    pass
