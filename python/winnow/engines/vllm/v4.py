"""vLLM's DeepSeek V4 attention by winnow: one attend() a layer, straight from vLLM's pages.

vLLM's own layer splits the batch. For decodes it translates the indexer's ids into slots. For
prefills it copies windows and compressed states into a bf16 workspace, chunk by chunk, and joins
both lists into rows of it. winnow.attend() takes all tokens, reads both caches by their block
tables, and keeps both lists apart; so all of that is left out.
"""

from __future__ import annotations

import logging

import torch
from vllm.forward_context import get_forward_context

import winnow
from winnow.engines.vllm.sparse_mla import planar_pages
from winnow.engines.vllm.sparse_mla import refused as attention_refused
from winnow.engines.vllm.tokens import once_a_step
from winnow.engines.vllm.v4_layer import int32

_log = logging.getLogger("vllm.winnow")


def attend(layer, q: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
    """Attention of the step's tokens over their windows and their compressed states."""
    metadata = get_forward_context().attn_metadata
    window = metadata[layer.swa_cache_layer.prefix]
    tokens = window.num_decode_tokens + window.num_prefill_tokens
    requests = window.token_to_req_indices[:tokens]

    def once(name, make):
        return once_a_step(name, q.device, make)

    at = int32(positions)[:tokens]
    lists, lengths = once("windows", lambda: winnow.window_lists(at, window=layer.window_size))
    states = {}
    if layer.compress_ratio > 1:
        built = metadata[layer.prefix]
        states["extra_cache"] = planar_pages(layer.kv_cache, "v4_fp8")
        states["extra_block_table"] = built.block_table
        if layer.compress_ratio == 4:
            # The indexer's choice.
            states["extra_indices"] = layer.topk_indices_buffer[:tokens]
        else:
            # All of them.
            states["extra_indices"], states["extra_lengths"] = once(
                "states",
                lambda: winnow.c128a_lists(
                    at,
                    requests,
                    built.block_table,
                    width=winnow.c128a_width(built.max_seq_len - 1, layer.compress_ratio),
                    ratio=layer.compress_ratio,
                    page=layer.kv_cache.shape[1],
                    pages=layer.kv_cache.shape[0],
                ),
            )
    # Where vLLM pads the heads for a kernel of its own, it reads the real ones only.
    heads = layer.n_local_heads
    winnow.attend(
        q[:tokens, :heads],
        planar_pages(layer.swa_cache_layer.kv_cache, "v4_fp8"),
        lists,
        lengths=lengths,
        block_table=window.block_table,
        requests=requests,
        scale=layer.scale,
        sink=layer.attn_sink[:heads],
        out=output[:tokens, :heads],
        **states,
    )


def refused(layer) -> str:
    """Why vLLM's own method should serve a layer that was just made; "" if winnow's can."""
    # vLLM before 0.30 knows no V4 with images.
    if getattr(layer, "max_image_tokens", 0) > 0:
        return "winnow's windows have no image spans"
    if layer.kv_cache_torch_dtype != torch.uint8:
        return f"winnow reads V4's fp8 records, not {layer.kv_cache_torch_dtype}"
    return attention_refused()


def layer_methods(cls: type) -> dict:
    """Methods for vLLM's V4 attention layer on a GPU."""
    initialise, forward = cls.__init__, cls.forward_mqa

    def __init__(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        why = refused(self)
        self.by_winnow = not why
        if why:
            _log.warning("winnow: not used for %s: %s", self.prefix, why)

    def forward_mqa(self, q, kv, positions, output):
        metadata = get_forward_context().attn_metadata
        if not self.by_winnow or (metadata is not None and not causal(self, metadata)):
            return forward(self, q, kv, positions, output)
        if metadata is None:
            # vLLM measures how much memory a step takes: none of its workspace, here.
            output.zero_()
            return None
        return attend(self, q, positions, output)

    return {"__init__": __init__, "forward_mqa": forward_mqa}


def causal(layer, metadata: dict) -> bool:
    """Whether a token sees its window and nothing behind itself: DSpark's drafts see more."""
    window = metadata[layer.swa_cache_layer.prefix]
    if not hasattr(window, "decode_swa_width"):
        # vLLM 0.26 and 0.27 tell by the lists themselves.
        lists = window.decode_swa_indices
        return lists is None or lists.shape[-1] == layer.window_size
    return window.decode_swa_width in (0, layer.window_size)
