#!/usr/bin/env python3
"""Golden vectors of the verbs around attention, from tiny Hugging Face models of real head sizes.

    python3 -m venv V && V/bin/pip install torch==2.13.0 transformers==5.22.2 numpy safetensors
    V/bin/python tools/make_layer_golden.py tests/data/golden/layers

Each file holds what one step of a layer reads and gives. Inputs are bf16 values and the models' own
weights; outputs are what the models' modules give for them in fp32, so that a kernel differs
from them by its own rounding alone. The same command gives the same bytes.
"""

import argparse
import math
import pathlib

import torch
from safetensors.torch import save_file

torch.set_num_threads(1)
torch.set_grad_enabled(False)

MOE = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1)
MLA = dict(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=96,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    n_group=1,
    topk_group=1,
    index_head_dim=128,
    index_topk=32,
    **MOE,
)


def randomise(model, seed=11):
    """Weights whose every term shows in the result."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.layers:
        for name, parameter in layer.self_attn.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.data = (0.0 if name.endswith("bias") else 1.0) + 0.2 * draw
            elif name.endswith(("position_bias", "sinks")):
                parameter.data = draw
            else:
                parameter.data = draw / math.sqrt(parameter.shape[-1])
    return model.eval()


def v32_model():
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as module

    yarn = dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=40.0,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
    )
    config = DeepseekV32Config(
        num_hidden_layers=1,
        first_k_dense_replace=1,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=4,
        rope_parameters=yarn,
        **MLA,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    return module, randomise(module.DeepseekV32Model(config))


def v4_model():
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as module

    config = DeepseekV4Config(
        vocab_size=97,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=512,
        q_lora_rank=96,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=4,
        index_head_dim=128,
        index_topk=4,
        sliding_window=128,
        compress_ratios=[0, 4, 128],
        mlp_layer_types=["moe"] * 3,
        qk_rope_head_dim=64,
        hc_sinkhorn_iters=4,
        rope_scaling=dict(
            type="yarn",
            factor=16,
            original_max_position_embeddings=65536,
            beta_fast=32,
            beta_slow=1,
        ),
        **MOE,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    return module, randomise(module.DeepseekV4Model(config))


def rounded(x):
    """bf16 values, kept in fp32 for the models."""
    return x.to(torch.bfloat16).float()


def drawn(*shape, seed):
    return rounded(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def bf16(x):
    return x.to(torch.bfloat16).contiguous()


class Given(torch.nn.Module):
    """Stands for a projection whose output is given."""

    def __init__(self, out):
        super().__init__()
        self.out = out

    def forward(self, _):
        return self.out


def norms(v32, v4):
    """RMSNorm with weights (V3.2's queries, V4's KV) and without (V4's heads); LayerNorm (V3.2)."""
    attention = v32[1].layers[0].self_attn
    query, kv, key = drawn(5, 96, seed=1), drawn(5, 512, seed=2), 3 + drawn(5, 128, seed=3)
    key = rounded(key)
    v4_attention = v4[1].layers[0].self_attn
    heads = drawn(5, 512, seed=4)
    return {
        "query.x": bf16(query),
        "query.weight": attention.q_a_layernorm.weight.float(),
        "query.out": attention.q_a_layernorm(query),
        "kv.x": bf16(kv),
        "kv.weight": v4_attention.kv_norm.weight.float(),
        "kv.out": v4_attention.kv_norm(kv),
        "heads.x": bf16(heads),
        "heads.out": v4_attention.q_b_norm(heads),
        "key.x": bf16(key),
        "key.weight": attention.indexer.k_norm.weight.float(),
        "key.bias": attention.indexer.k_norm.bias.float(),
        "key.out": attention.indexer.k_norm(key),
    }


POSITIONS = [0, 1, 2, 63, 100, 255]


def tables(model, x, positions, **rest):
    cos, sin = model(x, positions[None], **rest)
    return cos[0], sin[0]


def rotations(v32, v4):
    """V4: last 64 of 512, forwards and back, both tables; V3.2: the query part, the index part."""
    positions = torch.tensor(POSITIONS, dtype=torch.int32)
    out = {"positions": positions}
    module, model = v4
    x = drawn(len(POSITIONS), 1, 512, seed=5)
    out["v4.x"] = bf16(x)
    rotary = model.layers[1].self_attn.compressor.rotary_emb
    for name in ("main", "compress"):
        cos, sin = tables(rotary, x, positions, layer_type=name)
        turned = module.apply_rotary_pos_emb(x[None].transpose(1, 2), cos[None], sin[None])
        back = module.apply_rotary_pos_emb(x[None].transpose(1, 2), cos[None], -sin[None])
        out[f"v4.{name}.table"] = torch.stack([cos, sin], 1)
        out[f"v4.{name}.out"] = turned.transpose(1, 2)[0]
        out[f"v4.{name}.inverse"] = back.transpose(1, 2)[0]
    module, model = v32
    cos, sin = tables(model.rotary_emb, x, positions)
    out["v32.table"] = torch.stack([cos[:, :32], sin[:, :32]], 1)
    q, k = drawn(len(POSITIONS), 2, 64, seed=6), drawn(len(POSITIONS), 1, 64, seed=7)
    turned, _ = module.apply_rotary_pos_emb_interleave(
        q[None].transpose(1, 2), k[None].transpose(1, 2), cos[None], sin[None]
    )
    turned = turned.transpose(1, 2)[0]
    # The model leaves all first values, then all second ones; ours stay in place.
    turned = torch.stack([turned[..., :32], turned[..., 32:]], -1).flatten(-2)
    out["v32.query.x"], out["v32.query.out"] = bf16(q), turned
    index = drawn(len(POSITIONS), 2, 64, seed=8)
    turned, _ = module.apply_rotary_pos_emb(
        index[None].transpose(1, 2), index[None].transpose(1, 2), cos[None], sin[None]
    )
    out["v32.index.x"], out["v32.index.out"] = bf16(index), turned.transpose(1, 2)[0]
    return {name: tensor.contiguous() for name, tensor in out.items()}


class NoIndexer(torch.nn.Module):
    """Stands for an indexer whose choice nobody reads."""

    def forward(self, hidden_states, *_):
        return torch.zeros(*hidden_states.shape[:2], 1, dtype=torch.long)


class EntriesSeen(torch.nn.Module):
    """Stands for a scorer: keeps the entries that an indexer hands to it."""

    def forward(self, q, entries, _):
        self.entries = entries
        return torch.zeros(1, q.shape[1], entries.shape[1])


def compressor(module, tokens, seed, ratio):
    """Rows of a compressor (values, scores), its weights, and all its entries."""
    width = module.kv_proj.weight.shape[0]
    rows = drawn(tokens, 2 * width, seed=seed)
    module.kv_proj, module.gate_proj = Given(rows[None, :, :width]), Given(rows[None, :, width:])
    if hasattr(module, "indexer"):
        module.indexer = NoIndexer()
    if hasattr(module, "scorer"):
        module.scorer = EntriesSeen()
    module.position_bias.data = rounded(module.position_bias.data)
    hidden = torch.zeros(1, tokens, 128)
    residual = torch.zeros(1, tokens, 96)
    positions = torch.arange(tokens)[None]
    given = module(hidden, residual, positions, None, 0)
    entries = module.scorer.entries[0] if hasattr(module, "scorer") else given[0][0, 0]
    assert entries.shape[0] == tokens // ratio
    cos, sin = tables(module.rotary_emb, hidden, torch.arange(tokens), layer_type="compress")
    return {
        "rows": bf16(rows),
        "bias": bf16(module.position_bias),
        "weight": module.kv_norm.weight.float(),
        "table": torch.stack([cos, sin], 1),
        "entries": entries.contiguous(),
    }


def index_scores(v4):
    """V4's index queries and logits: rotated heads, raw weights, entries."""
    module, model = v4
    indexer = model.layers[1].self_attn.compressor.indexer
    tokens, heads, entries = 6, 4, 24
    q, keys = drawn(1, tokens, heads, 128, seed=21), drawn(1, entries, 128, seed=22)
    weights = drawn(1, tokens, heads, seed=23)
    positions = torch.tensor([POSITIONS], dtype=torch.int32)
    rotary = model.layers[2].self_attn.compressor.rotary_emb
    cos, sin = rotary(q, positions, layer_type="compress")
    turned = module.apply_rotary_pos_emb(q.transpose(1, 2), cos, sin).transpose(1, 2)
    indexer.scorer = module.DeepseekV4IndexerScorer(model.config)
    indexer.scorer.weights_proj = Given(weights)
    turned = rounded(turned)  # what an index cache in bf16 form is scored with
    return {
        "positions": positions[0],
        "table": torch.stack([cos[0], sin[0]], 1).contiguous(),
        "q": bf16(q[0]),
        "weights": bf16(weights[0]),
        "rotated": turned[0].contiguous(),
        "keys": bf16(keys[0]),
        "logits": indexer.scorer(turned, keys, None)[0].contiguous(),
    }


def output_groups(v4):
    """V4's grouped output projection: 2 groups of 1,024 values to 8."""
    projection = v4[1].layers[0].self_attn.o_a_proj
    projection.weight.data = rounded(projection.weight.data)
    x = drawn(3, 2, 1024, seed=31)
    return {
        "x": bf16(x),
        "weight": bf16(projection.weight),
        "out": projection(x[None])[0].contiguous(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    v32, v4 = v32_model(), v4_model()
    csa, hca = (v4[1].layers[i].self_attn.compressor for i in (1, 2))
    indexer = csa.indexer
    files = {
        "norm": norms(v32, v4),
        "rotate": rotations(v32, v4),
        "compress_c4a": compressor(csa, 13, 11, 4),
        "compress_c4a_index": compressor(indexer, 19, 12, 4),
        "compress_c128a": compressor(hca, 130, 13, 128),
        "output_groups": output_groups(v4),
    }
    files["index"] = index_scores(v4)
    total = 0
    for name, tensors in files.items():
        path = folder / f"{name}.safetensors"
        save_file({key: value.detach().contiguous() for key, value in tensors.items()}, path)
        total += path.stat().st_size
        print(f"{path}: {len(tensors)} tensors, {path.stat().st_size} B")
    print(f"{total} B in all")


if __name__ == "__main__":
    main()
