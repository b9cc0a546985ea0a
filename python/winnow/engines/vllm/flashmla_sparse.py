"""vLLM's backend FLASHMLA_SPARSE (fp8 caches, bf16 ones where it is asked for) by winnow."""

from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

from winnow.engines.vllm.sparse_mla import WinnowSparse


class WinnowFlashMLASparseBackend(WinnowSparse, FlashMLASparseBackend):
    pass
