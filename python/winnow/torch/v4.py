"""The attention layers of DeepSeek V4: window, and compressed entries where the layer has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from winnow import _winnow
from winnow.torch.caches import Records, State
from winnow.torch.layer import INDEX_DIM, FloatLinear, Layer, check_sizes
from winnow.torch.rope import Rope
from winnow.torch.step import Step
from winnow.torch.weights import Weights

HEAD = 512
INDEXER = "compressor.indexer"

# transformers' names (used here), and the checkpoint's.
_ALIASES = {
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "kv_norm": "norm",  # as save_pretrained() of transformers 5.23 spells it
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "compressor.kv_proj": "compressor.wkv",
    "compressor.gate_proj": "compressor.wgate",
    "compressor.kv_norm": "compressor.norm",
    "compressor.indexer.q_b_proj": "indexer.wq_b",
    "compressor.indexer.scorer.weights_proj": "indexer.weights_proj",
    "compressor.indexer.kv_proj": "indexer.compressor.wkv",
    "compressor.indexer.gate_proj": "indexer.compressor.wgate",
    "compressor.indexer.kv_norm": "indexer.compressor.norm",
}
ALIASES = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _ALIASES.items()} | {
    "sinks": "attn_sink",
    "compressor.position_bias": "compressor.ape",
    "compressor.indexer.position_bias": "indexer.compressor.ape",
}
RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def check_window_sizes(config, indexer: bool) -> None:
    check_sizes(config, "hidden", "heads", "q_lora", "window", "groups", "rank")
    if indexer:
        check_sizes(config, "index_heads", "topk")
    if config.heads % config.groups:
        raise ValueError(
            f"layers: config: groups: expected a divisor of {config.heads} heads, found "
            f"{config.groups}"
        )


@dataclass(frozen=True)
class V4Config:
    """Sizes and constants of one layer."""

    hidden: int
    heads: int
    q_lora: int
    ratio: int  # 0: window only; 4: C4A, with an indexer and overlap; 128: C128A, all entries
    window: int
    groups: int
    rank: int
    rope: Rope
    index_heads: int = 0
    topk: int = 0
    eps: float = 1e-6

    def __post_init__(self):
        if self.ratio not in RATIOS.values():
            raise ValueError(f"layers: config: ratio: expected 0, 4 or 128, found {self.ratio}")
        check_window_sizes(self, indexer=self.ratio == 4)

    @classmethod
    def of(cls, config, layer: int) -> V4Config:
        """From a configuration with the names of transformers' DeepseekV4Config."""
        rope_dim = int(config.head_dim * config.partial_rotary_factor)
        sizes = (config.head_dim, rope_dim, config.index_head_dim)
        if sizes != (HEAD, 64, INDEX_DIM):
            raise NotImplementedError(
                "layers: config: expected head_dim 512, 64 values with RoPE and index_head_dim "
                f"128, found {sizes[0]}, {sizes[1]} and {sizes[2]}"
            )
        kind = config.layer_types[layer]
        if kind in config.compress_rates and config.compress_rates[kind] != RATIOS[kind]:
            raise NotImplementedError(
                f"layers: config: expected compress_rates[{kind}] {RATIOS[kind]}, found "
                f"{config.compress_rates[kind]}"
            )
        return cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            q_lora=config.q_lora_rank,
            ratio=RATIOS[kind],
            window=config.sliding_window,
            groups=config.o_groups,
            rank=config.o_lora_rank,
            rope=Rope.of(config.rope_parameters["compress" if RATIOS[kind] else "main"]),
            index_heads=config.index_n_heads,
            topk=config.index_topk,
            eps=config.rms_norm_eps,
        )


class Compressor(nn.Module):
    """Pools rows of new tokens into entries of `ratio` tokens each: records of a cache."""

    def __init__(self, weights: Weights, module: str, config: V4Config, dim: int, name: str):
        super().__init__()
        self.config, self.name = config, name
        self.overlap = config.ratio == 4
        width = dim * (2 if self.overlap else 1)
        rows = [
            weights.matrix(f"{module}.{half}", width, config.hidden)
            for half in ("kv_proj", "gate_proj")
        ]
        # [tokens, values and scores]
        self.rows = FloatLinear(torch.cat(rows))
        bias = weights.tensor(f"{module}.position_bias", config.ratio, width)
        self.register_buffer("bias", bias, persistent=False)
        norm = weights.tensor(f"{module}.kv_norm.weight", dim)
        self.register_buffer("norm", norm, persistent=False)
        self.stores = [
            Records(name, "v4" if dim == HEAD else "index", ratio=config.ratio),
            State(name, config.ratio, self.overlap, 2 * width),
        ]

    def forward(self, x: Tensor, step: Step, layer: int) -> None:
        pages = step.caches.pages_of(layer, self.name)
        _winnow.compress(
            self.rows(x),
            step.positions,
            requests=step.requests,
            ratio=self.config.ratio,
            overlap=self.overlap,
            bias=self.bias,
            state=step.caches.state(layer, self.name),
            ring=True,
            norm_weight=self.norm,
            eps=self.config.eps,
            table=step.rope(self.config.rope),
            slots=step.slots(pages),
            cache=step.caches.cache(layer, self.name),
        )


class WindowLayer(Layer):
    """What V4 and V4.1 share: heads of 512, a window, grouped output projections.

    A subclass implements `compressed`: what is attended to besides the window.
    """

    q_norm = "rms"  # of each query head

    def __init__(self, config, weights: Weights):
        super().__init__([Records("window", "v4", window=config.window)])
        self.config = c = config
        q_a = weights.matrix("q_a_proj", c.q_lora, c.hidden)
        self.keep("qkv_a", torch.cat([q_a, weights.matrix("kv_proj", HEAD, c.hidden)]))
        self.keep("q_a_norm", weights.tensor("q_a_norm.weight", c.q_lora))
        self.keep("kv_norm", weights.tensor("kv_norm.weight", HEAD))
        self.keep("q_b", weights.matrix("q_b_proj", c.heads * HEAD, c.q_lora))
        per_group = c.heads * HEAD // c.groups
        o_a = weights.matrix("o_a_proj", c.groups * c.rank, per_group)
        self.keep("o_a", o_a.view(c.groups, c.rank, per_group).transpose(1, 2))
        self.keep("o_b", weights.matrix("o_b_proj", c.hidden, c.groups * c.rank))
        self.keep("sinks", weights.tensor("sinks", c.heads))

    def load_indexer(self, weights: Weights) -> None:
        """The weights of index queries; those of index keys differ by family."""
        c = self.config
        rows = c.index_heads * INDEX_DIM
        self.keep("index_q", weights.matrix(f"{INDEXER}.q_b_proj", rows, c.q_lora))
        scorer = f"{INDEXER}.scorer.weights_proj"
        self.keep("index_w", weights.matrix(scorer, c.index_heads, c.hidden))
        self.has_indexer = True

    def compressed(self, x: Tensor, index_queries: list[Tensor], step: Step) -> dict:
        """Stores the entries that the batch completes; gives attend()'s second list."""
        raise NotImplementedError

    def attend(self, x: Tensor, step: Step) -> Tensor:
        c = self.config
        q_a, kv = functional.linear(x, self.qkv_a).split([c.q_lora, HEAD], 1)
        turn = step.turn(c.rope)
        cache, pages = self.cache_of("window", step)
        record = {
            "kv": kv,
            "slots": step.slots(pages),
            "cache": cache,
            "norm": "rms",
            "norm_weight": self.kv_norm,
            "eps": c.eps,
            **turn,
        }
        q_c = _winnow.norm_write(
            norm={"x": q_a, "weight": self.q_a_norm, "eps": c.eps}, write=record
        )
        heads = functional.linear(q_c, self.q_b).view(-1, c.heads, HEAD)
        q, index_queries = self.prepare(
            {"q": heads, "norm": self.q_norm, "eps": c.eps}, x, q_c, turn, step
        )
        indices, lengths = step.window(pages)
        attended = _winnow.attend(
            q,
            cache,
            indices,
            lengths=lengths,
            scale=HEAD**-0.5,
            sink=self.sinks,
            **self.compressed(x, index_queries, step),
        )
        _winnow.rotate(attended, **turn, inverse=True, out=attended)
        groups = attended.view(-1, c.groups, self.o_a.shape[1]).transpose(0, 1)
        low_rank = torch.bmm(groups, self.o_a).transpose(0, 1).reshape(-1, c.groups * c.rank)
        return functional.linear(low_rank, self.o_b)


class V4Layer(WindowLayer):
    """Attention over a window and, by its ratio, over compressed entries.

    `tensors` is a checkpoint (or a module's state_dict); names follow `prefix`, for example
    "layers.3.attn.", in the checkpoint's spelling or in transformers'.
    """

    def __init__(
        self, config: V4Config, tensors: Mapping[str, Tensor], prefix: str = "", device=None
    ):
        weights = Weights(tensors, prefix, device, ALIASES)
        super().__init__(config, weights)
        c = config
        if c.ratio:
            self.entries = Compressor(weights, "compressor", c, HEAD, "entries")
            self.stores += self.entries.stores
        if c.ratio == 4:
            self.index_entries = Compressor(weights, INDEXER, c, INDEX_DIM, "index")
            self.stores += self.index_entries.stores
            self.load_indexer(weights)

    def compressed(self, x: Tensor, index_queries: list[Tensor], step: Step) -> dict:
        c = self.config
        if not c.ratio:
            return {}
        number = step.caches.number(self)
        self.entries(x, step, number)
        cache, pages = self.cache_of("entries", step)
        if c.ratio == 4:
            self.index_entries(x, step, number)
            slots, lengths = step.locate(self.choose(index_queries, step), pages)
        else:
            slots, lengths = step.every_entry(pages)
        return {"extra_cache": cache, "extra_indices": slots, "extra_lengths": lengths}
