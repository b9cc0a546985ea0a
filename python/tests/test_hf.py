"""transformers' models on winnow's attention: the same tokens as eager attention.

The models are random, in fp32, and seeded so that the best token of every step leads the second by
a multiple of what rounding attention's inputs to bf16 moves a logit (the test looks): the tokens
are equal because attention is right, and stay equal on another machine.
"""

import pytest
import torch

import winnow.hf
from conftest import on

transformers = pytest.importorskip("transformers", minversion="5.17")

COMMON = {
    "vocab_size": 16,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
DSA = {
    **COMMON,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 8,
}
V4 = {
    **COMMON,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_topk": 3,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["moe"] * 3,
    "hc_mult": 2,
    "partial_rotary_factor": 0.5,
}


def model_of(name, options, seed, device):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter, value in model.named_parameters():
        if parameter.endswith("sinks"):
            torch.nn.init.normal_(value)
    return model.to(device)


def prompt(device):
    """Three rows of 24 tokens, longer than index_topk; two of them padded on the left."""
    ids = torch.randint(2, 16, (3, 24))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    mask[2, :11] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


CASES = [("DeepseekV32", DSA, 14), ("GlmMoeDsa", DSA, 31), ("DeepseekV4", V4, 22)]


@on("mha")
@pytest.mark.parametrize(("name", "options", "seed"), CASES, ids=[c[0] for c in CASES])
def test_generate(name, options, seed, device):
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")
    winnow.hf.register()
    model, inputs = model_of(name, options, seed, device), prompt(device)
    results = {}
    for implementation in ("eager", "winnow"):
        model.set_attn_implementation(implementation)
        results[implementation] = model.generate(
            **inputs,
            max_new_tokens=6,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    eager, ours = (torch.stack(results[k].scores) for k in ("eager", "winnow"))
    best = eager.topk(2, -1).values
    margin, moved = (best[..., 0] - best[..., 1]).min(), (eager - ours).abs().max()
    assert 2 * moved < margin, (
        f"a logit moved by {moved:.3g}; the closest choice is {margin:.3g} apart"
    )
    assert torch.equal(results["eager"].sequences, results["winnow"].sequences)
    assert moved > 0, "the implementation was not used"


@on("mha")
@pytest.mark.parametrize("name", ["DeepseekV32", "DeepseekV4"])
def test_bf16_model(name, device):
    """A forward pass in bf16: about as far from eager in fp32 as eager in bf16 is."""
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")
    winnow.hf.register()
    model = model_of(name, DSA if name == "DeepseekV32" else V4, 14, device)
    # No longer than top-k or window: nothing to choose differently.
    ids = torch.randint(2, 16, (2, 7)).to(device)
    with torch.no_grad():
        exact = model(ids).logits
        model.bfloat16()
        eager = model(ids).logits.float()
        model.set_attn_implementation("winnow")
        ours = model(ids).logits.float()
    noise = (eager - exact).abs().mean()
    assert (ours - exact).abs().mean() < 1.5 * noise


def reference(query, key, value, bias, scale, sink):
    logits = query.double() @ key.double().transpose(2, 3) * scale + bias
    if sink is not None:
        column = sink.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return (torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ value.double()).transpose(
            1, 2
        )
    return (logits.softmax(-1) @ value.double()).transpose(1, 2)


@on("mha")
@pytest.mark.parametrize("kind", ["float", "bool", "none"])
@pytest.mark.parametrize("shared", [False, True])
def test_attention(kind, shared, device):
    """Indices that name masked keys, one KV head or all, sinks; and no mask, which means causal."""
    g = torch.Generator().manual_seed(2)
    query = torch.randn(2, 4, 5, 24, generator=g).bfloat16()
    key = torch.randn(2, 1 if shared else 4, 9, 24, generator=g).bfloat16()
    value = torch.randn(2, 1 if shared else 4, 9, 16, generator=g).bfloat16()
    sink = torch.randn(4, generator=g) if shared else None
    visible = torch.ones(2, 1, 5, 9, dtype=torch.bool).tril(4)
    indices = None
    if kind != "none":
        visible[1, ..., :3] = False
        indices = (
            torch.stack([torch.randperm(9, generator=g)[:6] for _ in range(10)]).view(2, 5, 6).int()
        )
        indices[..., 0] = 4  # a key that every query sees
    chosen = visible.clone()
    if indices is not None:
        chosen &= torch.zeros(2, 5, 9, dtype=torch.bool).scatter(2, indices.long(), True)[:, None]
    lowest = torch.finfo(torch.bfloat16).min
    masks = {"bool": visible, "float": torch.where(visible, 0.0, lowest).bfloat16(), "none": None}
    arguments = [query, key, value, masks[kind], 0.3, 0.0, indices, sink]
    arguments = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
    got, weights = winnow.hf.attention(torch.nn.Module(), *arguments)
    bias = torch.where(chosen, 0.0, float("-inf")).double()
    want = reference(query, key, value, bias, 0.3, sink)
    assert weights is None and got.shape == (2, 5, 4, 16)
    torch.testing.assert_close(got.double().cpu(), want, rtol=2**-7, atol=2**-7)


def test_inference_only():
    query = torch.randn(1, 2, 3, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="inference only"):
        winnow.hf.attention(torch.nn.Module(), query, query, query, None, scaling=1.0)
    with pytest.raises(NotImplementedError, match="a mask per head"):
        winnow.hf.attention(
            torch.nn.Module(), *[query.detach()] * 3, torch.zeros(1, 2, 3, 3), scaling=1.0
        )
    # Keys alone, and sinks, have gradients to lose as well.
    fixed = query.detach()
    for inputs in ((fixed, query, fixed), (fixed, fixed, query)):
        with pytest.raises(NotImplementedError, match="inference only"):
            winnow.hf.attention(torch.nn.Module(), *inputs, None, scaling=1.0)


TINY = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}


def test_softcap():
    """Gemma 2 caps its logits, which winnow does not: an error, not other logits."""
    winnow.hf.register()
    inputs = torch.randint(2, 16, (2, 9))
    for cap in (2.0, None):
        torch.manual_seed(0)
        config = transformers.Gemma2Config(**TINY, attn_logit_softcapping=cap, sliding_window=4)
        model = transformers.Gemma2ForCausalLM(config).eval().requires_grad_(False)
        model.set_attn_implementation("eager")
        want = model(inputs).logits
        model.set_attn_implementation("winnow")
        if cap is not None:
            with pytest.raises(NotImplementedError, match=r"winnow.hf: softcap: 2.0 would change"):
                model(inputs)
        else:
            torch.testing.assert_close(model(inputs).logits, want, rtol=0.05, atol=0.1)


def test_keywords():
    """Whatever would change the result is refused; what has no effect, or is None, is not."""
    query = torch.randn(1, 2, 5, 16)
    mask = torch.zeros(1, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))

    def attend(mask=mask, **keywords):
        return winnow.hf.attention(torch.nn.Module(), query, query, query, mask, 0.3, **keywords)[0]

    want = attend()
    ids = torch.arange(5)
    nothing = {"position_ids": ids, "use_cache": True, "cache_position": ids, "softcap": None}
    in_mask = {"sliding_window": 2, "cu_seq_lens_q": ids, "max_length_q": 5, "seq_idx": ids}
    assert torch.equal(attend(**nothing, **in_mask, output_attentions=False), want)
    for name, value in {
        "softcap": 30.0,
        "position_bias": query,
        "block_indices": ids,
        "cache": object(),
        "output_attentions": True,
        "head_mask": ids,
        "anything": 0,
    }.items():
        with pytest.raises(NotImplementedError, match=f"winnow.hf: {name}: .* is not served"):
            attend(**{name: value})
    # Without a mask nothing else says what a query sees.
    assert torch.equal(attend(None, sliding_window=5), want)
    for name, value in in_mask.items():
        with pytest.raises(NotImplementedError, match=f"{name}: .*without attention_mask"):
            attend(None, **{name: value})
    assert torch.equal(attend(None, is_causal=True), want)
    everything = attend(torch.zeros(1, 1, 5, 5))
    assert torch.equal(attend(None, is_causal=False), everything)
    assert not torch.equal(everything, want)
