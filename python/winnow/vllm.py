"""winnow in vLLM: a plugin that puts its kernels behind the sparse FlashMLA backend.

vLLM finds ``register`` through the installed package's entry point ``vllm.general_plugins``. The
backend class registered under the name FLASHMLA_SPARSE is vLLM's own, with the two functions that
call FlashMLA's kernels replaced by calls of ``winnow.flash_mla``: no padding of heads, no tile
schedule to keep. Cache records other than V3.2's (656 bytes, or 576 bf16) stay with vLLM's code.

Set ``WINNOW_VLLM=0`` to leave vLLM alone. docs/python.md says what was tested.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os

__all__ = ["register"]

_FP8_RECORD, _BF16_RECORD = 656, 576


@functools.cache
def _backend_class() -> type:
    """The class for vLLM, made over its sparse FlashMLA backend when it is first asked for."""
    from winnow import flash_mla

    theirs = importlib.import_module("vllm.v1.attention.backends.mla.flashmla_sparse")

    class WinnowSparseImpl(theirs.FlashMLASparseImpl):
        def _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata):
            # q [b, s_q, heads, 576], topk_indices [b, s_q, topk]: slots
            if kv_c_and_k_pe_cache.shape[-1] * kv_c_and_k_pe_cache.element_size() != _FP8_RECORD:
                return super()._fp8_flash_mla_kernel(
                    q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata
                )
            return flash_mla.flash_mla_with_kvcache(
                q,
                kv_c_and_k_pe_cache.unsqueeze(-2),
                None,
                None,
                512,
                softmax_scale=self.softmax_scale,
                is_fp8_kvcache=True,
                indices=topk_indices,
            )

        def _bf16_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, *lengths, **kwargs):
            # q [tokens, heads, 576], topk_indices [tokens, topk]: rows of the cache
            if kv_c_and_k_pe_cache.shape[-1] != _BF16_RECORD:
                return super()._bf16_flash_mla_kernel(
                    q, kv_c_and_k_pe_cache, topk_indices, *lengths, **kwargs
                )
            heads = (lengths[1] if len(lengths) > 1 else kwargs.get("actual_num_heads")) or q.shape[
                1
            ]
            out, _, lse = flash_mla.flash_mla_sparse_fwd(
                q[:, :heads],
                kv_c_and_k_pe_cache.view(-1, 1, _BF16_RECORD),
                topk_indices.view(q.shape[0], 1, -1),
                self.softmax_scale,
                topk_length=lengths[0] if lengths else kwargs.get("topk_length"),
            )
            return out, lse

    class WinnowSparseBackend(theirs.FlashMLASparseBackend):
        @staticmethod
        def get_impl_cls():
            return WinnowSparseImpl

    return WinnowSparseBackend


def __getattr__(name: str):
    # vLLM names the class by its path and imports it when the backend is chosen.
    if name == "WinnowSparseBackend":
        return _backend_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> bool:
    """Called by vLLM at its start. True if the backend was registered, False where vLLM is absent,
    has no registry of backends, or WINNOW_VLLM=0 forbids it.
    """
    if os.environ.get("WINNOW_VLLM") == "0" or importlib.util.find_spec("vllm") is None:
        return False
    try:
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        name = registry.AttentionBackendEnum.FLASHMLA_SPARSE
    except (ImportError, AttributeError):
        return False
    registry.register_backend(name, "winnow.vllm.WinnowSparseBackend")
    return True
