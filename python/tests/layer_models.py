"""Small random models of the three families, with the head sizes of the real ones."""

import math

import torch
import transformers

VOCABULARY = 16
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 48,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DSA = {
    **COMMON,
    "intermediate_size": 64,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 64,
}
OPTIONS = {
    "DeepseekV32": {
        **DSA,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "GlmMoeDsa": {
        **DSA,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "indexer_types": ["full", "shared", "full"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "DeepseekV4": {
        **COMMON,
        "num_hidden_layers": 3,
        "max_position_embeddings": 1048576,
        "head_dim": 512,
        "sliding_window": 128,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_topk": 16,
        "compress_ratios": [0, 4, 128],
        "mlp_layer_types": ["moe"] * 3,
        "qk_rope_head_dim": 64,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
}
FAMILIES = list(OPTIONS)


def model_of(family: str, seed: int, dtype=torch.bfloat16, **options):
    """A model whose attention weights all show in its tokens."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**OPTIONS[family] | options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for layer in model.model.layers:
        for name, parameter in layer.self_attn.named_parameters():
            draw = torch.randn_like(parameter)
            if "norm" in name:
                parameter.data = (0.0 if name.endswith("bias") else 1.0) + 0.2 * draw
            elif name.endswith(("position_bias", "sinks")):
                parameter.data = draw
            else:
                parameter.data = draw / math.sqrt(parameter.shape[-1])
    strict = model._keep_in_fp32_modules_strict or []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not any(k in name for k in [*strict, "inv_freq"]):
            tensor.data = tensor.data.to(dtype)
    return model


# Rows of a prompt: longer than top-k and, V4, than the window. Four more tokens cross position 255,
# where C4A and C128A close an entry.
LENGTHS = {"DeepseekV32": (100, 80, 70), "GlmMoeDsa": (100, 80, 70), "DeepseekV4": (253, 140, 70)}


def tokens(seed: int, *shape) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def prompt(seed: int, lengths) -> dict:
    """Rows of random tokens, padded on the left to the longest."""
    longest = max(lengths)
    ids, mask = tokens(seed, len(lengths), longest), torch.ones(len(lengths), longest).long()
    for row, length in enumerate(lengths):
        ids[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    return {"input_ids": ids, "attention_mask": mask}
