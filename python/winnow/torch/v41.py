"""The attention layers of DeepSeek V4.1: entries, index keys and choices that layers share.

A layer is one of four: sliding (ratio 0), a source of entries and index keys, a layer that chooses
anew among those of the last source, or one that takes the last choice too. Records are V4's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from winnow import _winnow
from winnow.torch.caches import Records, State
from winnow.torch.layer import INDEX_DIM, FloatLinear, check_flags
from winnow.torch.rope import Rope
from winnow.torch.step import Step
from winnow.torch.v4 import ALIASES, HEAD, WindowLayer, check_window_sizes
from winnow.torch.weights import Weights


@dataclass(frozen=True)
class V41Config:
    """Sizes and constants of one layer."""

    hidden: int
    heads: int
    q_lora: int
    ratio: int  # tokens of an entry, 1 or 2; 0: window only
    window: int
    groups: int
    rank: int
    rope: Rope
    index_heads: int = 0
    topk: int = 0
    eps: float = 1e-20
    makes_entries: bool = True  # and index keys, for itself and for later layers
    chooses: bool = True  # has an indexer; else it takes the last choice
    block: int = 8  # entries of a candidate block
    candidates: int = 2048
    finds_blocks: bool = False  # gives the best blocks to later layers
    within_blocks: bool = False  # chooses inside these alone

    def __post_init__(self):
        check_flags(self, "makes_entries", "chooses", "finds_blocks", "within_blocks")
        if self.ratio not in (0, 1, 2):
            raise ValueError(f"layers: config: ratio: expected 0, 1 or 2, found {self.ratio}")
        check_window_sizes(self, indexer=self.ratio > 0 and self.chooses)

    @classmethod
    def of(cls, config, layer: int) -> V41Config:
        """From a configuration with the names of DeepSeek-V4.1-Flash's text_config."""
        sizes = (config.head_dim, config.qk_rope_head_dim, config.index_head_dim)
        if sizes != (HEAD, 64, INDEX_DIM):
            raise NotImplementedError(
                "layers: config: expected head_dim 512, qk_rope_head_dim 64 and index_head_dim "
                f"128, found {sizes[0]}, {sizes[1]} and {sizes[2]}"
            )
        ratio = config.compress_ratios[layer]
        if ratio not in (0, 1, 2):
            raise NotImplementedError(
                f"layers: config: expected compress_ratios of 0, 1 and 2, found {ratio}"
            )
        scaling = dict(config.rope_scaling or {})
        rope = Rope(float(config.rope_theta))
        if ratio and scaling:
            rope = Rope.of(scaling, float(config.compress_rope_theta))
        source = config.candidate_source_layer_id
        chooses = ratio > 0 and layer in config.index_source_layer_ids
        return cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            q_lora=config.q_lora_rank,
            ratio=ratio,
            window=config.sliding_window,
            groups=config.o_groups,
            rank=config.o_lora_rank,
            rope=rope,
            index_heads=config.index_n_heads,
            topk=config.index_topk,
            eps=config.rms_norm_eps,
            makes_entries=ratio > 0 and layer in config.kv_source_layer_ids,
            chooses=chooses,
            block=config.candidate_block_size,
            candidates=config.candidate_topk_blocks,
            finds_blocks=chooses and layer == source,
            within_blocks=chooses and 0 <= source < layer,
        )


class V41Layer(WindowLayer):
    """Attention over a window and over the chosen entries of the last layer that stores some.

    `tensors` is a checkpoint; names follow `prefix`, for example "layers.3.attn.". Layers run in
    the order of the model: one that stores or chooses nothing reads what the last one left in the
    step.
    """

    q_norm = "none"

    def __init__(
        self, config: V41Config, tensors: Mapping[str, Tensor], prefix: str = "", device=None
    ):
        weights = Weights(tensors, prefix, device, ALIASES)
        super().__init__(config, weights)
        c = config
        if not c.ratio:
            return
        if c.makes_entries:
            self._load_entries(weights)
        if c.chooses:
            self.load_indexer(weights)

    def _load_entries(self, weights: Weights) -> None:
        c = self.config
        halves = ["kv_proj", "gate_proj"] if c.ratio > 1 else ["kv_proj"]
        rows = [weights.matrix(f"compressor.{half}", HEAD, c.hidden) for half in halves]
        self.entry_rows = FloatLinear(torch.cat(rows))
        self.keep("entry_norm", weights.tensor("compressor.kv_norm.weight", HEAD))
        self.keep("index_k", weights.matrix("indexer.wk", INDEX_DIM, HEAD))
        self.keep("index_norm", weights.tensor("indexer.k_norm.weight", INDEX_DIM))
        self.stores += [
            Records("entries", "v4", ratio=c.ratio),
            Records("index", "index", ratio=c.ratio),
        ]
        if c.ratio > 1:
            self.stores.append(State("entries", c.ratio, False, 2 * HEAD))

    def compressed(self, x: Tensor, index_queries: list[Tensor], step: Step) -> dict:
        c = self.config
        if not c.ratio:
            return {}
        if c.makes_entries:
            self._store(x, step)
            step.entry_source = step.caches.number(self)
        elif step.entry_source is None:
            raise ValueError("layers: step: a layer without entries needs one with them before")
        cache, pages = self.cache_of("entries", step, step.entry_source)
        if c.chooses:
            step.chosen = step.locate(self._choose(index_queries, step), pages)
        elif step.chosen is None:
            raise ValueError("layers: step: a layer without an indexer needs one with it before")
        slots, lengths = step.chosen
        return {"extra_cache": cache, "extra_indices": slots, "extra_lengths": lengths}

    def _store(self, x: Tensor, step: Step) -> None:
        """Entries, and index keys from what they are before RoPE."""
        c = self.config
        table = step.rope(c.rope)
        cache, pages = self.cache_of("entries", step)
        latent = torch.zeros(x.shape[0], HEAD, dtype=torch.bfloat16, device=x.device)
        state = {}
        if c.ratio > 1:
            state = {"state": step.caches.state(step.caches.number(self), "entries"), "ring": True}
        _winnow.compress(
            self.entry_rows(x),
            step.positions,
            requests=step.requests,
            ratio=c.ratio,
            gate=c.ratio > 1,
            norm_weight=self.entry_norm,
            eps=c.eps,
            table=table,
            slots=step.slots(pages),
            cache=cache,
            latent=latent,
            **state,
        )
        keys, pages = self.cache_of("index", step)
        # A token that closes no entry has no slot: what its row holds is not stored.
        _winnow.write(
            functional.linear(latent, self.index_k),
            step.slots(pages),
            keys,
            norm="rms",
            norm_weight=self.index_norm,
            eps=c.eps,
            positions=step.positions - (c.ratio - 1),
            table=table,
        )

    def _choose(self, index_queries: list[Tensor], step: Step) -> Tensor:
        c = self.config
        blocks: dict = {"block": c.block}
        if c.finds_blocks:
            seen = -(-(step.context // c.ratio) // c.block)
            blocks["best"] = max(1, min(c.candidates, seen))
        if c.within_blocks:
            if step.blocks is None:
                raise ValueError("layers: step: a layer that chooses in blocks needs their source")
            blocks["within"] = step.blocks
        chosen = self.choose(index_queries, step, source=step.entry_source, blocks=blocks)
        if not c.finds_blocks:
            return chosen
        ids, step.blocks = chosen
        return ids
