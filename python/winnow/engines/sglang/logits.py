"""The logits of SGLang's indexer by winnow, in place of DeepGEMM's.

SGLang asks two functions which code computes them, and then calls it: over pages of index keys for
decodes, over rows for prefills. The hooks here stand around those two functions.
"""

from __future__ import annotations

# Bytes of an index key in a page: 128 e4m3 values and an f32 scale.
_RECORD = 132


def _wide(tokens: int, width: int, like):
    """[tokens, width] f32 in rows of a multiple of 16 bytes, as SGLang's selection asks for."""
    import torch

    return torch.empty(tokens, (width + 3) // 4 * 4, dtype=torch.float32, device=like.device)[
        :, :width
    ]


def _visible(context_lens, batch: int, drafts: int):
    """How many keys each token sees: given for each, or by a request's last token."""
    import torch

    if context_lens.numel() == batch * drafts:
        return context_lens.reshape(-1)
    behind = torch.arange(1 - drafts, 1, dtype=torch.int32, device=context_lens.device)
    return (context_lens.reshape(-1, 1) + behind).clamp_(min=0).reshape(-1)


def paged_logits(q, kv_cache, weights, context_lens, block_table, max_seq_len):
    """Tokens [batch, drafts] of requests over pages [pages, page, 1, 132]."""
    import torch

    import winnow

    batch, drafts = q.shape[:2]
    pages, page = kv_cache.shape[:2]
    flat = kv_cache.view(torch.uint8).as_strided((pages, page * _RECORD), (kv_cache.stride(0), 1))
    requests = torch.arange(batch, dtype=torch.int32, device=q.device)
    return winnow.score(
        q.flatten(0, 1),
        weights,
        _visible(context_lens, batch, drafts),
        keys=winnow.Cache(flat, "index_keys", page),
        block_table=block_table,
        requests=requests if drafts == 1 else requests.repeat_interleave(drafts),
        width=max_seq_len,
        out=_wide(batch * drafts, max_seq_len, q),
    )


def row_logits(q, kv, weights, starts, ends):
    """Tokens over rows of keys [rows, 128] and their scales, each over rows starts to ends."""
    import winnow

    keys, scales = kv
    return winnow.score(
        q,
        weights,
        ends,
        starts=starts,
        key_rows=keys.reshape(-1, keys.shape[-1]),
        key_scales=scales.reshape(-1),
        width=scales.numel(),
        out=_wide(q.shape[0], scales.numel(), q),
    )


def _asks(more: dict) -> bool:
    """Whether a call asks for more than its first arguments: clean logits, a list of blocks."""
    return any(
        value is not None and (not isinstance(value, (bool, int)) or bool(value))
        for value in more.values()
    )


def _is_e4m3(q, weights) -> bool:
    import torch

    return q.dtype == torch.float8_e4m3fn and q.shape[-1] == 128 and weights.dtype == torch.float32


def resolve_fp8_paged_mqa_logits_fn(original):
    """Around SGLang's function of this name."""

    def fp8_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, schedule, max_seq_len, **more
    ):
        if _asks(more) or not _is_e4m3(q, weights) or kv_cache.shape[-1] != _RECORD:
            return original()(
                q, kv_cache, weights, context_lens, block_table, schedule, max_seq_len, **more
            )
        return paged_logits(q, kv_cache, weights, context_lens, block_table, max_seq_len)

    return fp8_paged_mqa_logits


def resolve_fp8_mqa_logits_fn(original):
    """Around SGLang's function of this name."""

    def fp8_mqa_logits(q, kv, weights, starts, ends, **more):
        if _asks(more) or not _is_e4m3(q, weights):
            return original()(q, kv, weights, starts, ends, **more)
        return row_logits(q, kv, weights, starts, ends)

    return fp8_mqa_logits
