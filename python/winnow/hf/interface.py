"""winnow as an attention implementation of transformers: ``register()``, then load a model with
``attn_implementation="winnow"``.

DeepseekV32 and GlmMoeDsa run on sparse attention over the indexer's top-k; DeepseekV4 (whose mask
covers window and compressed entries) and any other model that uses the attention interface run on
the same kernel over all keys that their mask leaves. Queries, keys and values of a model in another
dtype are rounded to bf16 on the way in; sums are fp32 in any case. A keyword that would change the
result and is not served (softcap, position_bias, ...) raises NotImplementedError.
"""

from __future__ import annotations

import torch

from winnow import _winnow

# Keywords of transformers that the result does not depend on.
_WITHOUT_EFFECT = {
    "cache_position",
    "deterministic",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
# Keywords that say which keys a query sees. Where there is a mask, it says the same.
_IN_THE_MASK = {
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "max_length_k",
    "max_length_q",
    "seq_idx",
    "sliding_window",
}


def _refuse_what_is_not_served(keywords: dict, has_mask: bool, keys: int) -> None:
    for name, value in keywords.items():
        if value is None or name in _WITHOUT_EFFECT or (has_mask and name in _IN_THE_MASK):
            continue
        if name == "sliding_window" and value >= keys:
            continue
        if name == "output_attentions" and not value:
            continue
        found = repr(value) if isinstance(value, (bool, float, int, str)) else "a value"
        without = " without attention_mask" if name in _IN_THE_MASK else ""
        raise NotImplementedError(
            f"winnow.hf: {name}: {found}{without} would change the result and is not served; "
            "use another attn_implementation for this model"
        )


def _bias(mask: torch.Tensor | None, batch: int, keys: int) -> dict:
    """A 4D mask as what attend_mha() takes, per batch entry: bool -> mask, float -> bias."""
    if mask is None:
        return {}
    if mask.shape[1] != 1:
        raise NotImplementedError(f"winnow.hf: a mask per head (of shape {list(mask.shape)})")
    if mask.shape[3] < keys:  # a longer one serves a static cache
        raise ValueError(
            f"winnow.hf: attention_mask: expected {keys} keys or more, found {list(mask.shape)}"
        )
    mask = mask[:, 0].expand(batch, -1, -1)  # one for all as well
    if mask.dtype == torch.bool:
        return {"mask": mask}
    # "Masked" is the dtype's lowest number in transformers; a key so marked must not count at all.
    lowest = torch.finfo(mask.dtype).min
    return {"bias": mask.float().masked_fill(mask <= lowest / 2, float("-inf"))}


def _per_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, H or fewer, keys, d] -> [B, keys, H, d]; one head is shared without a copy."""
    if x.shape[1] == 1:
        x = x.expand(-1, heads, -1, -1)
    elif x.shape[1] != heads:
        x = x.repeat_interleave(heads // x.shape[1], dim=1)
    return x.transpose(1, 2)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The function behind the name: query [B, H, q, d_qk], key and value [B, H or 1, keys, d],
    attention_mask [B, 1, q, keys] bool or float, indices [B, q, topk] int32, s_aux [H] sinks.
    Without attention_mask, is_causal (else the module's) says what a query sees. Other keywords are
    refused unless they have no effect on the result. Returns [B, q, H, d_v].
    """
    _refuse_what_is_not_served(kwargs, attention_mask is not None, key.shape[2])
    inputs = [x for x in (query, key, value, s_aux) if x is not None]
    if dropout or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        raise NotImplementedError(
            "winnow.hf: inference only: no dropout, and run under torch.no_grad()"
        )
    batch, heads, tokens, _ = query.shape
    q = query.transpose(1, 2).bfloat16()
    k, v = _per_head(key.bfloat16(), heads), _per_head(value.bfloat16(), heads)
    lengths = None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and tokens > 1:
        # No mask means causal: query i sees the keys up to its own.
        first = key.shape[2] - tokens + 1
        lengths = torch.arange(first, key.shape[2] + 1, dtype=torch.int32, device=query.device)
    masks = _bias(attention_mask, batch, key.shape[2])
    sink = None if s_aux is None else s_aux.float()
    scale = query.shape[3] ** -0.5 if scaling is None else scaling  # transformers' own default
    out = q.new_empty(batch, tokens, heads, value.shape[-1])
    for b in range(batch):
        _winnow.attend_mha(
            q[b],
            k[b],
            v[b],
            ids=None if indices is None else indices[b],
            lengths=lengths,
            scale=scale,
            sink=sink,
            out=out[b],
            **{name: x[b] for name, x in masks.items()},
        )
    return out.to(query.dtype), None


def register(name: str = "winnow") -> None:
    """Adds the implementation to transformers under a name.

    The masks are those of eager attention, float [B, 1, q, keys]: DeepseekV32's and GlmMoeDsa's
    indexers need one to be there, and DeepseekV4 extends it over its compressed entries.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, eager_mask)
