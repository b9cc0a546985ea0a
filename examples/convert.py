#!/usr/bin/env python3
"""A transformers model on winnow's attention layers, with paged caches in fp8.

    python examples/convert.py                     a small random DeepSeek V3.2
    python examples/convert.py --family glm        or GLM-5, or v4
    python examples/convert.py --model FOLDER      a model of these families, with its tokenizer

Prints what generate() gives, the bytes that a token takes in the caches beside those of
transformers' own, and how long prompts and a decode step take with either. Needs torch and
transformers.
"""

import argparse
import sys
import time

import torch
import transformers

import winnow.hf

COMMON = dict(
    vocab_size=256,
    hidden_size=128,
    num_attention_heads=4,
    q_lora_rank=64,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    index_n_heads=4,
    index_head_dim=128,
    pad_token_id=0,
    eos_token_id=None,
)
DSA = dict(
    **COMMON,
    intermediate_size=128,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    num_key_value_heads=4,
    n_group=1,
    topk_group=1,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_topk=64,
)
# Head sizes are the real models', all else is small.
FAMILIES = {
    "v32": ("DeepseekV32", dict(**DSA, qk_nope_head_dim=128, v_head_dim=128)),
    "glm": ("GlmMoeDsa", dict(**DSA, qk_nope_head_dim=192, v_head_dim=256)),
    "v4": (
        "DeepseekV4",
        dict(
            **COMMON,
            num_hidden_layers=3,
            compress_ratios=[0, 4, 128],
            mlp_layer_types=["moe"] * 3,
            index_topk=64,
            o_groups=2,
            o_lora_rank=64,
            hc_mult=2,
        ),
    ),
}


def small_model(family):
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    return getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().eval()


def bytes_of(cache):
    """Bytes of the tensors in transformers' own cache, each storage once."""
    found = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for x in value.values() if isinstance(value, dict) else [value]:
                if isinstance(x, torch.Tensor):
                    found[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
    return sum(found.values())


@torch.no_grad()
def measured(model, tokens, bytes_of):
    """Bytes of the cache of a row of `tokens` and of twice as many, which come in chunks of 512;
    the seconds that this takes, and the best of ten decode steps behind it."""
    cache, sizes, prompts = None, [], 0
    for half in torch.randint(1, 256, (2, tokens), device=model.device):
        began = time.perf_counter()
        for chunk in half.split(512):
            cache = model(
                chunk[None], past_key_values=cache, use_cache=True, logits_to_keep=1
            ).past_key_values
        prompts += time.perf_counter() - began
        sizes.append(bytes_of(cache))
    steps = []
    for _ in range(10):
        began = time.perf_counter()
        model(half[None, :1], past_key_values=cache, use_cache=True).logits.argmax().item()
        steps.append(time.perf_counter() - began)
    return sizes, prompts, min(steps)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--family", choices=FAMILIES, default="v32", help="of the small random model (v32)"
    )
    parser.add_argument("--model", help="a folder with a model and its tokenizer")
    parser.add_argument("--prompt", default="Sparse attention reads", help="with --model")
    parser.add_argument("--cache", choices=["fp8", "bf16"], default="fp8", help="records (fp8)")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="measure at this context and twice it (8192)"
    )
    args = parser.parse_args(arguments)

    if args.model:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
        inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    else:
        model = small_model(args.family)
        inputs = {"input_ids": torch.randint(1, 256, (1, 200))}
    print(
        f"measuring with caches of {args.tokens} and {2 * args.tokens} tokens (--tokens): minutes "
        "on a CPU",
        file=sys.stderr,
    )
    before = measured(model, args.tokens, bytes_of)
    winnow.hf.convert(model, args.cache)
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(new) if args.model else new.tolist())
    after = measured(model, args.tokens, lambda cache: cache.used_bytes())
    for name, (sizes, prompts, step) in (("transformers", before), (f"winnow {args.cache}", after)):
        token = (sizes[1] - sizes[0]) / args.tokens
        row = sizes[0] - token * args.tokens
        print(f"{name}: {token:g} B a token, all layers, and {row:.0f} B a row")
        taken = f"{prompts:.2f} s for {2 * args.tokens} tokens, then {step * 1e3:.2f} ms a step"
        print(f"{name}: {taken}")


if __name__ == "__main__":
    main()
