"""winnow's operations as PyTorch custom operators, ``torch.ops.winnow.*``.

They have fake kernels, so ``torch.compile`` and ``torch.export`` trace through them, and they run
on the current stream, so CUDA graphs capture them. A cache is a plain tensor here, with the name of
its format (and, where its shape does not say, the page size). Operators that fill a cache end in
``_``.
Operators make their results: they have the arguments of the plain calls but for ``out``,
``workspace``, ``plan``, ``part``, ``kernel`` and results that are asked for (``max_logit``,
``values``). ``select_best`` and ``score_select_best`` give the best blocks too. fused.py has the
operators that join several verbs.
Inference only: no operator has a derivative.
"""

from __future__ import annotations

import torch

import winnow.torch.fused  # noqa: F401  (defines its operators)
from winnow import _winnow
from winnow.torch.registration import cache_of, new_bf16, new_f32, new_i32, operator, ops

__all__ = ["ops"]

# ---- norm, rotate, prepare_query, index_query, compress ---------------------------------------


@operator(
    "norm(Tensor x, Tensor? weight=None, *, str norm='rms', Tensor? norm_bias=None, float "
    "eps=1e-6) -> Tensor"
)
def _norm(x, weight=None, **rest):
    return _winnow.norm(x, weight, **rest)


@_norm.fake
def _(x, weight=None, **rest):
    return new_bf16(x, *x.shape)


@operator(
    "rope_table_(Tensor(a!) out, *, float theta=10000.0, float factor=1.0, int original=0, float "
    "beta_fast=32.0, float beta_slow=1.0) -> ()"
)
def _rope_table(out, **rest):
    _winnow.rope_table(out, **rest)


@_rope_table.fake
def _(out, **rest):
    return None


# Rows of tokens whose position is outside the table are zeros: operators give whole tensors.


@operator(
    "rotate(Tensor x, Tensor positions, Tensor table, *, str pairs='interleaved', str "
    "slice='last', bool inverse=False) -> Tensor"
)
def _rotate(x, positions, table, **rest):
    return _winnow.rotate(x, positions, table, out=x.new_zeros(x.shape), **rest)


@_rotate.fake
def _(x, positions, table, **rest):
    return new_bf16(x, *x.shape)


@operator(
    "rotate_e4m3(Tensor x, Tensor positions, Tensor table, *, str pairs='interleaved', str "
    "slice='last', bool inverse=False, str scale='default') -> (Tensor, Tensor)"
)
def _rotate_e4m3(x, positions, table, **rest):
    tokens, heads, width = x.shape
    out = torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = x.new_zeros((tokens, heads, width // 128), dtype=torch.float32)
    return _winnow.rotate(x, positions, table, e4m3=True, out=out, scales=scales, **rest)


@_rotate_e4m3.fake
def _(x, positions, table, **rest):
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return codes, new_f32(x, x.shape[0], x.shape[1], x.shape[2] // 128)


@operator(
    "prepare_query(Tensor q, Tensor positions, Tensor table, *, str norm='none', Tensor? "
    "norm_weight=None, Tensor? norm_bias=None, float eps=1e-6, str pairs='interleaved', str "
    "slice='last') -> Tensor"
)
def _prepare_query(q, positions, table, **rest):
    return _winnow.prepare_query(q, positions, table, out=q.new_zeros(q.shape), **rest)


@_prepare_query.fake
def _(q, positions, table, **rest):
    return new_bf16(q, *q.shape)


@operator(
    "index_query(Tensor q, Tensor weights, Tensor positions, Tensor table, *, float factor=1.0, "
    "bool hadamard=False, str scale='default', bool bf16=False, str pairs='interleaved', str "
    "slice='last') -> (Tensor, Tensor)"
)
def _index_query(q, weights, positions, table, *, bf16=False, **rest):
    out = q.new_zeros(q.shape, dtype=torch.bfloat16 if bf16 else torch.float8_e4m3fn)
    made = q.new_zeros(q.shape[:2], dtype=torch.float32)
    return _winnow.index_query(
        q, weights, positions, table, bf16=bf16, out=out, out_weights=made, **rest
    )


@_index_query.fake
def _(q, weights, positions, table, *, bf16=False, **rest):
    dtype = torch.bfloat16 if bf16 else torch.float8_e4m3fn
    return q.new_empty(q.shape, dtype=dtype), new_f32(q, *q.shape[:2])


@operator(
    "compress_(Tensor(a!)? cache, Tensor(b!)? state, Tensor(c!)? latent, Tensor rows, Tensor "
    "positions, str format='v4_fp8', int? page=None, *, Tensor? requests=None, int ratio=4, bool "
    "overlap=False, bool gate=True, Tensor? bias=None, Tensor? state_table=None, bool ring=False, "
    "str norm='rms', Tensor? norm_weight=None, Tensor? norm_bias=None, float eps=1e-6, Tensor? "
    "table=None, str pairs='interleaved', str slice='last', bool hadamard=False, Tensor? "
    "slots=None, str scale='default') -> ()"
)
def _compress(cache, state, latent, rows, positions, format="v4_fp8", page=None, **rest):
    pages = cache_of(cache, format, page)
    _winnow.compress(rows, positions, state=state, cache=pages, latent=latent, **rest)


@_compress.fake
def _(cache, state, latent, rows, positions, format="v4_fp8", page=None, **rest):
    return None


# ---- write, gather, join, quantize ------------------------------------------------------------


@operator(
    "write_(Tensor(a!) cache, Tensor kv, Tensor slots, str format, int? page=None, *, Tensor? "
    "rope=None, str scale='default', str norm='none', Tensor? norm_weight=None, Tensor? "
    "norm_bias=None, float eps=1e-6, Tensor? positions=None, Tensor? table=None, str "
    "pairs='interleaved', str slice='last', bool hadamard=False) -> ()"
)
def _write(cache, kv, slots, format, page=None, **rest):
    _winnow.write(kv, slots, cache_of(cache, format, page), **rest)


@_write.fake
def _(cache, kv, slots, format, page=None, **rest):
    return None


@operator(
    "gather(Tensor cache, Tensor block_table, Tensor lengths, SymInt rows, str format, int? "
    "page=None, *, Tensor? starts=None, Tensor? out_starts=None) -> Tensor"
)
def _gather(cache, block_table, lengths, rows, format, page=None, *, starts=None, out_starts=None):
    out = block_table.new_zeros(rows, _winnow.record_dim(format), dtype=torch.bfloat16)
    return _winnow.gather(
        cache_of(cache, format, page),
        block_table,
        lengths,
        starts=starts,
        out_starts=out_starts,
        out=out,
    )


@_gather.fake
def _(cache, block_table, lengths, rows, format, page=None, *, starts=None, out_starts=None):
    return new_bf16(cache, rows, _winnow.record_dim(format))


@operator("join(Tensor latent, Tensor rope) -> Tensor")
def _join(latent, rope):
    return _winnow.join(latent, rope)


@_join.fake
def _(latent, rope):
    return new_bf16(latent, *latent.shape[:2], latent.shape[2] + rope.shape[2])


@operator("quantize(Tensor x) -> (Tensor, Tensor)")
def _quantize(x):
    return _winnow.quantize(x)


@_quantize.fake
def _(x):
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), new_f32(x, 1)


# ---- score, select, locate --------------------------------------------------------------------


def _index_cache(q, keys, page):
    """Index keys have the queries' type."""
    return cache_of(keys, "index_keys_bf16" if q.dtype == torch.bfloat16 else "index_keys", page)


@operator(
    "score(Tensor q, Tensor weights, Tensor ends, *, Tensor? starts=None, Tensor? keys=None, int? "
    "page=None, Tensor? block_table=None, Tensor? requests=None, Tensor? key_rows=None, Tensor? "
    "key_scales=None, SymInt width) -> Tensor"
)
def _score(q, weights, ends, *, keys=None, page=None, width, **rest):
    return _winnow.score(
        q, weights, ends, keys=_index_cache(q, keys, page), width=width, clean=True, **rest
    )


@_score.fake
def _(q, weights, ends, *, width, **rest):
    return new_f32(q, q.shape[0], width)


@operator(
    "score_select(Tensor q, Tensor weights, Tensor ends, SymInt topk, *, Tensor? starts=None, "
    "Tensor? keys=None, int? page=None, Tensor? block_table=None, Tensor? requests=None, Tensor? "
    "key_rows=None, Tensor? key_scales=None, bool relative=False, Tensor? within=None, int "
    "block=8) -> Tensor"
)
def _score_select(q, weights, ends, topk, *, keys=None, page=None, **rest):
    return _winnow.score_select(q, weights, ends, topk, keys=_index_cache(q, keys, page), **rest)


@_score_select.fake
def _(q, weights, ends, topk, **rest):
    return new_i32(q, q.shape[0], topk)


@operator(
    "score_select_best(Tensor q, Tensor weights, Tensor ends, SymInt topk, SymInt best, *, Tensor? "
    "starts=None, Tensor? keys=None, int? page=None, Tensor? block_table=None, Tensor? "
    "requests=None, Tensor? key_rows=None, Tensor? key_scales=None, bool relative=False, Tensor? "
    "within=None, int block=8) -> (Tensor, Tensor)"
)
def _score_select_best(q, weights, ends, topk, best, *, keys=None, page=None, **rest):
    blocks = q.new_empty((q.shape[0], best), dtype=torch.int32)  # also where best is 0
    keys = _index_cache(q, keys, page)
    return _winnow.score_select(q, weights, ends, topk, keys=keys, best_blocks=blocks, **rest)


@_score_select_best.fake
def _(q, weights, ends, topk, best, **rest):
    return new_i32(q, q.shape[0], topk), new_i32(q, q.shape[0], best)


@operator(
    "select(Tensor logits, SymInt topk, *, Tensor? starts=None, Tensor? ends=None, bool "
    "relative=False, Tensor? within=None, int block=8) -> Tensor"
)
def _select(logits, topk, **rest):
    return _winnow.select(logits, topk, **rest)


@_select.fake
def _(logits, topk, **rest):
    return new_i32(logits, logits.shape[0], topk)


@operator(
    "select_best(Tensor logits, SymInt topk, SymInt best, *, Tensor? starts=None, Tensor? "
    "ends=None, bool relative=False, Tensor? within=None, int block=8) -> (Tensor, Tensor)"
)
def _select_best(logits, topk, best, **rest):
    blocks = logits.new_empty((logits.shape[0], best), dtype=torch.int32)
    return _winnow.select(logits, topk, best_blocks=blocks, **rest)


@_select_best.fake
def _(logits, topk, best, **rest):
    return new_i32(logits, logits.shape[0], topk), new_i32(logits, logits.shape[0], best)


@operator(
    "locate(Tensor ids, Tensor requests, Tensor block_table, *, int page=64, SymInt pages, int "
    "rows_per_page=0, Tensor? prefill_requests=None, Tensor? workspace_starts=None, SymInt "
    "workspace_rows=0, int world=1, int rank=0, int interleave=1, bool compact=False) -> (Tensor, "
    "Tensor)"
)
def _locate(ids, requests, block_table, **rest):
    return _winnow.locate(ids, requests, block_table, counts=True, **rest)


@_locate.fake
def _(ids, requests, block_table, **rest):
    return new_i32(ids, *ids.shape), new_i32(ids, ids.shape[0])


# ---- attend -----------------------------------------------------------------------------------


@operator(
    "attend(Tensor q, Tensor cache, Tensor indices, str format, int? page=None, *, float "
    "scale, Tensor? lengths=None, Tensor? block_table=None, Tensor? extra_cache=None, int? "
    "extra_page=None, Tensor? extra_indices=None, Tensor? extra_lengths=None, Tensor? "
    "extra_block_table=None, Tensor? requests=None, Tensor? q_rope=None, Tensor? sink=None, bool "
    "empty_lse_negative=False, str precision='full', str? extra_format=None) -> (Tensor, Tensor)"
)
def _attend(
    q,
    cache,
    indices,
    format,
    page=None,
    *,
    extra_cache=None,
    extra_page=None,
    extra_format=None,
    **rest,
):
    extra = cache_of(extra_cache, extra_format or format, extra_page)
    return _winnow.attend(
        q, cache_of(cache, format, page), indices, extra_cache=extra, lse=True, **rest
    )


@_attend.fake
def _(q, cache, indices, format, page=None, **rest):
    return new_bf16(q, *q.shape[:2], 512), new_f32(q, *q.shape[:2])


@operator(
    "attend_mha(Tensor q, Tensor k, Tensor v, *, float scale, Tensor? ids=None, Tensor? "
    "starts=None, Tensor? lengths=None, Tensor? mask=None, Tensor? bits=None, Tensor? bias=None, "
    "Tensor? sink=None, bool empty_lse_negative=False) -> (Tensor, Tensor)"
)
def _attend_mha(q, k, v, **rest):
    return _winnow.attend_mha(q, k, v, lse=True, **rest)


@_attend_mha.fake
def _(q, k, v, **rest):
    return new_bf16(q, *q.shape[:2], v.shape[2]), new_f32(q, *q.shape[:2])


@operator("topk_mask(Tensor ids, SymInt keys, *, Tensor? lengths=None) -> Tensor")
def _topk_mask(ids, keys, *, lengths=None):
    return _winnow.topk_mask(ids, keys, lengths=lengths)


@_topk_mask.fake
def _(ids, keys, *, lengths=None):
    return ids.new_empty((ids.shape[0], (keys + 7) // 8), dtype=torch.uint8)


@operator("merge(Tensor partial_out, Tensor partial_lse, *, Tensor? sink=None) -> (Tensor, Tensor)")
def _merge(partial_out, partial_lse, *, sink=None):
    return _winnow.merge(partial_out, partial_lse, sink=sink, lse=True)


@_merge.fake
def _(partial_out, partial_lse, *, sink=None):
    return new_bf16(partial_out, *partial_out.shape[1:]), new_f32(
        partial_lse, *partial_lse.shape[1:]
    )


# ---- V4's lists -------------------------------------------------------------------------------


@operator(
    "compressed_slots(Tensor positions, Tensor requests, Tensor block_table, *, int ratio=4, int "
    "page=64, SymInt pages, int world=1, int rank=0, int interleave=1) -> Tensor"
)
def _compressed_slots(positions, requests, block_table, **rest):
    return _winnow.compressed_slots(positions, requests, block_table, **rest)


@_compressed_slots.fake
def _(positions, requests, block_table, **rest):
    return positions.new_empty(positions.shape, dtype=torch.int64)


@operator(
    "c128a_lists(Tensor positions, Tensor requests, Tensor block_table, *, SymInt width, int "
    "ratio=128, int page=64, SymInt pages, SymInt decode_tokens=0, int world=1, int rank=0, int "
    "interleave=1) -> (Tensor, Tensor)"
)
def _c128a_lists(positions, requests, block_table, **rest):
    return _winnow.c128a_lists(positions, requests, block_table, **rest)


@_c128a_lists.fake
def _(positions, requests, block_table, *, width, **rest):
    return new_i32(positions, positions.shape[0], width), new_i32(positions, positions.shape[0])


@operator(
    "window_lists(Tensor positions, Tensor? requests=None, Tensor? block_table=None, *, int "
    "window=128, int page=64, SymInt pages=0, int world=1, int rank=0, int interleave=1) -> "
    "(Tensor, Tensor)"
)
def _window_lists(positions, requests=None, block_table=None, **rest):
    return _winnow.window_lists(positions, requests, block_table, **rest)


@_window_lists.fake
def _(positions, requests=None, block_table=None, *, window=128, **rest):
    return new_i32(positions, positions.shape[0], window), new_i32(positions, positions.shape[0])


@operator(
    "combined_lists(Tensor topk, Tensor positions, Tensor requests, Tensor seq_lens, Tensor "
    "gather_lens, *, SymInt compressed, SymInt rows, int first_request=0, int ratio=4, int "
    "window=128) -> (Tensor, Tensor)"
)
def _combined_lists(topk, positions, requests, seq_lens, gather_lens, **rest):
    return _winnow.combined_lists(topk, positions, requests, seq_lens, gather_lens, **rest)


@_combined_lists.fake
def _(topk, positions, requests, seq_lens, gather_lens, *, window=128, **rest):
    width = (topk.shape[1] + window + 127) // 128 * 128
    return new_i32(topk, topk.shape[0], width), new_i32(topk, topk.shape[0])


# ---- absorb -----------------------------------------------------------------------------------


@operator("dequantize_weight(Tensor weight, Tensor scale) -> Tensor")
def _dequantize_weight(weight, scale):
    return _winnow.dequantize_weight(weight, scale)


@_dequantize_weight.fake
def _(weight, scale):
    return new_bf16(weight, *weight.shape)


@operator("split_kv_b(Tensor weight, int d_nope) -> (Tensor, Tensor)")
def _split_kv_b(weight, d_nope):
    return _winnow.split_kv_b(weight, d_nope)


@_split_kv_b.fake
def _(weight, d_nope):
    latent, heads, both = weight.shape
    return new_bf16(weight, latent, heads, d_nope), new_bf16(weight, latent, heads, both - d_nope)


@operator("absorb_query(Tensor q_nope, Tensor w_uk) -> Tensor")
def _absorb_query(q_nope, w_uk):
    return _winnow.absorb_query(q_nope, w_uk)


@_absorb_query.fake
def _(q_nope, w_uk):
    return new_bf16(q_nope, *q_nope.shape[:2], w_uk.shape[0])


@operator("project_output(Tensor attn, Tensor w_uv) -> Tensor")
def _project_output(attn, w_uv):
    return _winnow.project_output(attn, w_uv)


@_project_output.fake
def _(attn, w_uv):
    return new_bf16(attn, *attn.shape[:2], w_uv.shape[2])


@operator("decompress(Tensor latent, Tensor w_uk, Tensor w_uv) -> (Tensor, Tensor)")
def _decompress(latent, w_uk, w_uv):
    return _winnow.decompress(latent, w_uk, w_uv)


@_decompress.fake
def _(latent, w_uk, w_uv):
    rows, heads = latent.shape[0], w_uk.shape[1]
    d_k = w_uk.shape[2] + latent.shape[1] - w_uk.shape[0]
    return new_bf16(latent, rows, heads, d_k), new_bf16(latent, rows, heads, w_uv.shape[2])
