"""FlashMLA's Python interface over winnow: ``import winnow.flash_mla as flash_mla``.

Same names, argument order, shapes and conventions (lse is natural, +inf for a query without a
valid index), on CPU and CUDA tensors with rows and pages of any strides of whole 16 bytes, for
any number of heads up to 128, any top-k, page size and length. Only sparse calls: winnow has no
dense attention over a paged cache.
"""

from __future__ import annotations

import dataclasses

import torch

from winnow import _winnow

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

_FP8 = {576: "v32_fp8", 512: "v4_fp8"}
_BF16 = {576: "v32_bf16", 512: "v4_bf16"}


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What get_mla_metadata() gives. winnow schedules inside each call; any call may use it.

    The fields are those that callers of FlashMLA read; winnow fills in none of them.
    """

    have_initialized: bool = False
    config: object | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None]:
    """Arguments of every version of this function are accepted and not needed."""
    return FlashMLASchedMeta(), None


def _format(names: dict[int, str], head_dim: int) -> str:
    if head_dim not in names:
        raise ValueError(f"flash_mla: q: expected a head size of 576 or 512, found {head_dim}")
    return names[head_dim]


def _check_v(head_dim_v: int) -> None:
    if head_dim_v != 512:
        raise NotImplementedError(f"flash_mla: values have 512 dimensions, not {head_dim_v}")


def _tokens(lengths: torch.Tensor | None, s_q: int) -> torch.Tensor | None:
    """One length per request -> one per query token."""
    return lengths.repeat_interleave(s_q) if lengths is not None and s_q != 1 else lengths


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decode from a paged cache.

    q                [b, s_q, h, 576 or 512] bf16
    k_cache          [pages, page, 1, 656] (V3.2) or [pages, page, 1, 584] (V4) in a one-byte dtype;
                     or bf16 [pages, page, 1, head size] with is_fp8_kvcache=False
    indices          [b, s_q, topk] int32: page * page size + offset; what is outside is skipped
    topk_length      [b] int32: only the first entries of each list
    extra_*          the second list, in one softmax with the first
    attn_sink        [h] f32
    softmax_scale    1 / sqrt(head size) if not given, as FlashMLA has it
    block_table, cache_seqlens, tile_scheduler_metadata, num_splits: not needed, not read

    Returns out [b, s_q, h, 512] bf16 and lse [b, h, s_q] f32.
    """
    if indices is None:
        raise NotImplementedError(
            "winnow.flash_mla: dense attention (a call without indices) is not part of winnow; "
            "pass indices for sparse attention"
        )
    if causal:
        raise ValueError("flash_mla: causal: expected False with indices, which say what is seen")
    _check_v(head_dim_v)
    if q.dim() != 4:
        raise ValueError(f"flash_mla: q: expected [b, s_q, h, d], found {list(q.shape)}")
    b, s_q, heads, head_dim = q.shape
    if out is not None and (out.shape != (b, s_q, heads, head_dim_v) or out.dtype != q.dtype):
        raise ValueError(
            f"flash_mla: out: expected {[b, s_q, heads, head_dim_v]} {q.dtype}, "
            f"found {list(out.shape)} {out.dtype}"
        )
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None) or (
        extra_k_cache is None and extra_topk_length is not None
    ):
        raise ValueError(
            "flash_mla: extra_k_cache: expected with extra_indices_in_kvcache, and "
            "extra_topk_length with both; found one without the other"
        )
    if indices.dim() != 3 or indices.shape[:2] != (b, s_q):
        raise ValueError(
            f"flash_mla: indices: expected [{b}, {s_q}, topk], found {list(indices.shape)}"
        )
    name = _format(_FP8 if is_fp8_kvcache else _BF16, head_dim)
    extra = {}
    if extra_k_cache is not None:
        extra = {
            "extra_cache": _winnow.Cache(extra_k_cache, name),
            "extra_indices": extra_indices_in_kvcache.flatten(0, 1),
            "extra_lengths": _tokens(extra_topk_length, s_q),
        }
    # A caller's out whose two first dimensions cannot be one goes through a copy.
    mergeable = out is None or s_q == 1 or out.stride(0) == s_q * out.stride(1)
    got, lse = _winnow.attend(
        q.flatten(0, 1),
        _winnow.Cache(k_cache, name),
        indices.flatten(0, 1),
        lengths=_tokens(topk_length, s_q),
        scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        sink=attn_sink,
        out=out.flatten(0, 1) if out is not None and mergeable else None,
        lse=True,
        **extra,
    )
    if out is None:
        out = got.view(b, s_q, heads, head_dim_v)
    elif not mergeable:
        out.copy_(got.view(out.shape))
    return out, lse.view(b, s_q, heads).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill over a contiguous bf16 KV.

    q            [s_q, h, 576 or 512] bf16
    kv           [s_kv, 1, head size] bf16, rows of any stride of whole 16 bytes
    indices      [s_q, 1, topk] int32: rows of kv; what is outside is skipped
    topk_length  [s_q] int32

    Returns out [s_q, h, 512] bf16, max_logits [s_q, h] f32 and lse [s_q, h] f32.
    """
    _check_v(d_v)
    if kv.dim() != 3 or kv.shape[1] != 1 or indices.dim() != 3 or indices.shape[1] != 1:
        raise NotImplementedError(
            f"flash_mla: expected kv and indices with one KV head, found kv {list(kv.shape)} "
            f"and indices {list(indices.shape)}"
        )
    got, lse, max_logit = _winnow.attend(
        q,
        _winnow.Cache(kv.squeeze(1), _format(_BF16, q.shape[-1])),
        indices.squeeze(1),
        lengths=topk_length,
        scale=sm_scale,
        sink=attn_sink,
        out=out,
        lse=True,
        max_logit=True,
    )
    return got, max_logit, lse


def _dense(name: str):
    def function(*args, **kwargs):
        raise NotImplementedError(
            f"winnow.flash_mla: {name} is dense attention, which is not part of winnow"
        )

    function.__name__ = name
    function.__doc__ = "Dense attention: raises NotImplementedError."
    return function


flash_attn_varlen_func = _dense("flash_attn_varlen_func")
flash_attn_varlen_qkvpacked_func = _dense("flash_attn_varlen_qkvpacked_func")
flash_attn_varlen_kvpacked_func = _dense("flash_attn_varlen_kvpacked_func")
