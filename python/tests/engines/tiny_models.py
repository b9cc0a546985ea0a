"""Tiny random models with the attention of real ones, saved as checkpoints, and what transformers
answers for them."""

import json
import pathlib

import safetensors.torch
import torch
import transformers

PROMPTS = [
    list(range(2, 40)),
    [7 * i % 500 + 2 for i in range(150)],
    [3 * i % 400 + 5 for i in range(260)],
]
TOKENS = 12
# Head sizes are those of the published models; everything else is as small as it may be.
_COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "max_position_embeddings": 4096,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_V32 = {**_COMMON, "qk_nope_head_dim": 64, "v_head_dim": 64}
_GLM = {**_COMMON, "qk_nope_head_dim": 96, "v_head_dim": 128}
# A layer of each kind: a window only, C4A with its indexer, C128A. The first layer's experts are
# chosen by token ids.
_V4_RATIOS = [0, 4, 128]
_V4 = {
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": len(_V4_RATIOS),
    "compress_ratios": _V4_RATIOS,
    "num_hash_layers": 1,
    "num_attention_heads": 8,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "sliding_window": 128,
    "max_position_embeddings": 4096,
    "routed_scaling_factor": 1.0,
    "hc_mult": 2,
}


def _v4(topk: int):
    model = transformers.DeepseekV4ForCausalLM(
        transformers.DeepseekV4Config(index_topk=topk, **_V4)
    )
    tokens = torch.arange(_V4["vocab_size"])
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("tid2eid"):
            # Two different ones for each token.
            first = tokens % 4
            tensor.copy_(torch.stack([first, (first + 1 + tokens // 4 % 3) % 4], 1))
        elif name.endswith(("sinks", "position_bias")):
            # transformers starts them at zero.
            tensor.data.normal_()
    return model


def _model(family: str, topk: int):
    if family == "deepseek_v4":
        return _v4(topk)
    if family == "deepseek_v32":
        config = transformers.DeepseekV32Config(index_topk=topk, **_V32)
        return transformers.DeepseekV32ForCausalLM(config)
    config = transformers.GlmMoeDsaConfig(index_topk=topk, **_GLM)
    return transformers.GlmMoeDsaForCausalLM(config)


def _publish_names(path: pathlib.Path) -> None:
    """V4's tensors by the names of the published checkpoints, which transformers reads and vLLM
    reads, and which transformers writes in part."""
    tensors = safetensors.torch.load_file(path)
    for ours, published in (
        ("model.", ""),
        ("embed_tokens.", "embed."),
        ("hc_head.hc_", "hc_head_"),
        (".attn.norm.", ".attn.kv_norm."),
    ):
        tensors = {name.replace(ours, published): x for name, x in tensors.items()}
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def make(folder: pathlib.Path, family: str, topk: int, scale: float = 3.0, seed: int = 0) -> dict:
    """Writes the model into folder; gives it, and greedy tokens and log probabilities by
    transformers."""
    torch.manual_seed(seed)
    model = _model(family, topk).bfloat16().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)  # logits with a clear winner
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # vLLM counts layers by this, under names that differ between versions of transformers.
    config.pop("layer_types", None)
    # What the published checkpoints say and vLLM reads.
    if family == "deepseek_v4":
        _publish_names(folder / "model.safetensors")
        config.update(topk_method="noaux_tc", expert_dtype="bf16", **_V4)
    else:
        config.update(topk_method="noaux_tc", scoring_func="sigmoid")
    path.write_text(json.dumps(config))
    model.set_attn_implementation("eager")
    answers, logprobs = [], []
    with torch.no_grad():
        for prompt in PROMPTS:
            got = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
            )
            answers.append(got[0, len(prompt) :].tolist())
            probabilities = torch.log_softmax(model(got).logits[0].float(), -1)
            logprobs.append(probabilities[:-1].gather(1, got[0, 1:, None])[:, 0].tolist())
    return {"model": model, "answers": answers, "logprobs": logprobs}
