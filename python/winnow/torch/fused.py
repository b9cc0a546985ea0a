"""Operators of norm_write() and prepare_queries(): several verbs in one call.

A schema has no dict for each part, so all arguments stand in one list. Those of the first write()
and of prepare_query() have their own names. Those of norm() begin with ``x``, and those of the
indexer's write() and of index_query() with ``index_``. Positions and table are the same for all.
"""

from __future__ import annotations

import torch

from winnow import _winnow
from winnow.torch.registration import cache_of, new_bf16, new_f32, operator


def part_of(rest: dict, prefix: str) -> dict:
    """The arguments whose names begin with `prefix`, without it; they leave `rest`."""
    names = [name for name in rest if name.startswith(prefix)]
    return {name.removeprefix(prefix): rest.pop(name) for name in names}


def _options_of_write(prefix: str) -> str:
    return (
        f"Tensor? {prefix}rope=None, str {prefix}scale='default', str {prefix}norm='none', Tensor? "
        f"{prefix}norm_weight=None, Tensor? {prefix}norm_bias=None, float {prefix}eps=1e-6, str "
        f"{prefix}pairs='interleaved', str {prefix}slice='last', bool {prefix}hadamard=False"
    )


@operator(
    "norm_write_(Tensor(a!) cache, Tensor(b!)? index_cache, Tensor x, Tensor? x_weight, Tensor kv, "
    "Tensor slots, str format, int? page=None, *, str x_norm='rms', Tensor? x_norm_bias=None, "
    "float x_eps=1e-6, Tensor? positions=None, Tensor? table=None, "
    f"{_options_of_write('')}, Tensor? index_kv=None, Tensor? index_slots=None, str "
    f"index_format='index_keys', int? index_page=None, {_options_of_write('index_')}) -> Tensor"
)
def _norm_write(cache, index_cache, x, x_weight, kv, slots, format, page=None, **rest):
    turn = {name: rest.pop(name, None) for name in ("positions", "table")}
    norm = {"x": x, "weight": x_weight, **part_of(rest, "x_")}
    index = part_of(rest, "index_")
    keys = cache_of(index_cache, index.pop("format", "index_keys"), index.pop("page", None))
    write = [{"kv": kv, "slots": slots, "cache": cache_of(cache, format, page), **rest, **turn}]
    if any(given is not None for given in (keys, index.get("kv"), index.get("slots"))):
        write.append({"cache": keys, **index, **turn})
    return _winnow.norm_write(norm=norm, write=write)


@_norm_write.fake
def _(cache, index_cache, x, x_weight, kv, slots, format, page=None, **rest):
    return new_bf16(x, *x.shape)


@operator(
    "prepare_queries(Tensor q, Tensor index_q, Tensor index_weights, Tensor positions, Tensor "
    "table, *, str norm='none', Tensor? norm_weight=None, Tensor? norm_bias=None, float eps=1e-6, "
    "str pairs='interleaved', str slice='last', float index_factor=1.0, bool index_hadamard=False, "
    "str index_scale='default', bool index_bf16=False, str index_pairs='interleaved', str "
    "index_slice='last') -> (Tensor, Tensor, Tensor)"
)
def _prepare_queries(q, index_q, index_weights, positions, table, **rest):
    # Rows of tokens whose position is outside the table are zeros: operators give whole tensors.
    turn = {"positions": positions, "table": table}
    index = part_of(rest, "index_")
    codes = torch.bfloat16 if index.get("bf16") else torch.float8_e4m3fn
    query = {"q": q, **rest, **turn, "out": q.new_zeros(q.shape)}
    index |= {"q": index_q, "weights": index_weights, **turn}
    index["out"] = index_q.new_zeros(index_q.shape, dtype=codes)
    index["out_weights"] = index_q.new_zeros(index_q.shape[:2], dtype=torch.float32)
    return _winnow.prepare_queries(query=query, index=index)


@_prepare_queries.fake
def _(q, index_q, index_weights, positions, table, *, index_bf16=False, **rest):
    codes = torch.bfloat16 if index_bf16 else torch.float8_e4m3fn
    return (
        new_bf16(q, *q.shape),
        index_q.new_empty(index_q.shape, dtype=codes),
        new_f32(index_q, *index_q.shape[:2]),
    )
