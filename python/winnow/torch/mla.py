"""The attention layer of DeepSeek V3.2 and of GLM-5: MLA over the indexer's top-k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from winnow import _winnow
from winnow.torch.caches import Records
from winnow.torch.layer import INDEX_DIM, Layer, check_flags, check_sizes
from winnow.torch.operators import ops
from winnow.torch.rope import Rope, mscale
from winnow.torch.step import Step
from winnow.torch.weights import Weights

LATENT, ROPE_DIM = 512, 64
INDEX_EPS = 1e-6  # of the LayerNorm in front of index keys, in every model


@dataclass(frozen=True)
class MlaConfig:
    """Sizes and constants of one layer."""

    hidden: int
    heads: int
    q_lora: int
    nope: int
    value: int
    index_heads: int
    topk: int
    scale: float
    rope: Rope
    eps: float = 1e-6
    # Pairs that RoPE rotates in index queries and keys: V3.2 "half", GLM "interleaved".
    index_pairs: str = "half"
    # GLM: a layer without an indexer attends to what the last one with an indexer chose.
    indexer: bool = True

    def __post_init__(self):
        check_flags(self, "indexer")
        check_sizes(self, "hidden", "heads", "q_lora", "nope", "value")
        if self.indexer:
            check_sizes(self, "index_heads", "topk")

    @classmethod
    def of(cls, config, layer: int) -> MlaConfig:
        """From a configuration with the names of transformers' (DeepseekV32, GlmMoeDsa)."""
        sizes = (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim)
        if sizes != (LATENT, ROPE_DIM, INDEX_DIM):
            raise NotImplementedError(
                "layers: config: expected kv_lora_rank 512, qk_rope_head_dim 64 and index_head_dim "
                f"128, found {sizes[0]}, {sizes[1]} and {sizes[2]}"
            )
        parameters = config.rope_parameters
        scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        if parameters.get("rope_type", "default") != "default" and parameters.get("mscale_all_dim"):
            scale *= mscale(parameters["factor"], parameters["mscale_all_dim"]) ** 2
        glm = config.model_type == "glm_moe_dsa"
        return cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            q_lora=config.q_lora_rank,
            nope=config.qk_nope_head_dim,
            value=config.v_head_dim,
            index_heads=config.index_n_heads,
            topk=config.index_topk,
            scale=scale,
            rope=Rope.of(parameters),
            eps=config.rms_norm_eps,
            index_pairs="interleaved" if glm else "half",
            indexer=not glm or config.indexer_types[layer] == "full",
        )


class MlaLayer(Layer):
    """MLA over the indexer's choice, or over that of a layer before.

    `tensors` is a checkpoint (or a module's state_dict); names follow `prefix`, for example
    "model.layers.3.self_attn.".
    """

    def __init__(
        self, config: MlaConfig, tensors: Mapping[str, Tensor], prefix: str = "", device=None
    ):
        super().__init__([Records("kv", "v32")])
        self.config = c = config
        weights = Weights(tensors, prefix, device, {})
        heads_qk = c.heads * (c.nope + ROPE_DIM)
        # One GEMM for queries and keys: both read x.
        q_a = weights.matrix("q_a_proj", c.q_lora, c.hidden)
        kv_a = weights.matrix("kv_a_proj_with_mqa", LATENT + ROPE_DIM, c.hidden)
        self.keep("qkv_a", torch.cat([q_a, kv_a]))
        self.keep("q_a_norm", weights.tensor("q_a_layernorm.weight", c.q_lora))
        self.keep("kv_a_norm", weights.tensor("kv_a_layernorm.weight", LATENT))
        self.keep("q_b", weights.matrix("q_b_proj", heads_qk, c.q_lora))
        kv_b = weights.matrix("kv_b_proj", c.heads * (c.nope + c.value), LATENT)
        per_head = kv_b.view(c.heads, c.nope + c.value, LATENT).permute(2, 0, 1)
        w_uk, w_uv = ops.split_kv_b(per_head, c.nope)
        self.keep("w_uk", w_uk)
        self.keep("w_uv", w_uv)
        self.keep("o", weights.matrix("o_proj", c.hidden, c.heads * c.value))
        if c.indexer:
            self.has_indexer = True
            self.index_rope = {"pairs": c.index_pairs, "slice": "first"}
            self.stores.append(Records("index", "index"))
            n = c.index_heads
            self.keep("index_q", weights.matrix("indexer.wq_b", n * INDEX_DIM, c.q_lora))
            self.keep("index_k", weights.matrix("indexer.wk", INDEX_DIM, c.hidden))
            self.keep("index_w", weights.matrix("indexer.weights_proj", n, c.hidden))
            self.keep("index_norm", weights.tensor("indexer.k_norm.weight", INDEX_DIM))
            self.keep("index_bias", weights.tensor("indexer.k_norm.bias", INDEX_DIM))

    def attend(self, x: Tensor, step: Step) -> Tensor:
        c = self.config
        projected = functional.linear(x, self.qkv_a)
        q_a, latent, k_rope = projected.split([c.q_lora, LATENT, ROPE_DIM], 1)
        turn = step.turn(c.rope)
        cache, pages = self.cache_of("kv", step)
        record = {
            "kv": latent,
            "rope": k_rope,
            "slots": step.slots(pages),
            "cache": cache,
            "norm": "rms",
            "norm_weight": self.kv_a_norm,
            "eps": c.eps,
            **turn,
        }
        q_c = _winnow.norm_write(
            norm={"x": q_a, "weight": self.q_a_norm, "eps": c.eps},
            write=[record, self._index_key(x, turn, step)] if c.indexer else record,
        )
        q = functional.linear(q_c, self.q_b).view(-1, c.heads, c.nope + ROPE_DIM)
        q_rope, index_queries = self.prepare({"q": q[..., c.nope :]}, x, q_c, turn, step)
        if c.indexer:
            step.chosen = step.locate(self.choose(index_queries, step), pages)
        elif step.chosen is None:
            raise ValueError("layers: step: a layer without an indexer needs one with it before")
        slots, counts = step.chosen
        attended = _winnow.attend(
            _winnow.absorb_query(q[..., : c.nope], self.w_uk),
            cache,
            slots,
            q_rope=q_rope,
            lengths=counts,
            scale=c.scale,
        )
        return functional.linear(_winnow.project_output(attended, self.w_uv).flatten(1), self.o)

    def _index_key(self, x: Tensor, turn: dict, step: Step) -> dict:
        """Arguments of write() for the batch's index keys."""
        keys, pages = self.cache_of("index", step)
        return {
            "kv": functional.linear(x, self.index_k),
            "slots": step.slots(pages),
            "cache": keys,
            "norm": "layer",
            "norm_weight": self.index_norm,
            "norm_bias": self.index_bias,
            "eps": INDEX_EPS,
            **self.index_rope,
            **turn,
        }
