"""vLLM's engine on its CPU platform, in a process of its own: greedy tokens of a model's prompts.

    python cpu_engine.py REQUEST.json ANSWER.json

The request has "model" (a folder), "prompts" (lists of token ids), "scored" (lists of token ids
whose log probabilities are asked for), "tokens" (how many to generate) and "arguments" for LLM().
"""

import json
import os
import sys

os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    CUDA_VISIBLE_DEVICES="",
    TRITON_INTERPRET="1",
    HF_HUB_OFFLINE="1",
)

import torch
from calls import counted

import winnow


def extension() -> torch.library.Library:
    """What vLLM's worker calls of its compiled module before anything is computed."""
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, result in (
        ("init_cpu_memory_env(int[] nodes) -> ()", None),
        ("init_cpu_threads_env(str ids) -> str", ""),
    ):
        library.define(schema)
        name = schema[: schema.index("(")]
        library.impl(name, lambda _, result=result: result, "CompositeExplicitAutograd")
    return library


def experts(library: torch.library.Library) -> None:
    """vLLM's compiled experts for unquantised weights, which all of its CPU builds have."""

    def prepack(weight, packed, isa):
        packed.copy_(weight)

    def fused(out, x, w13, w2, b13, b2, weights, ids, skip_weighted, act, isa):
        out.zero_()
        for token, expert in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
            chosen = ids[token, expert]
            gate, up = (w13[chosen].float() @ x[token].float()).chunk(2)
            got = w2[chosen].float() @ (torch.nn.functional.silu(gate) * up)
            out[token] += (got * weights[token, expert]).to(out.dtype)

    for schema, function in (
        ("prepack_moe_weight(Tensor weight, Tensor(a!) packed, str isa) -> ()", prepack),
        (
            "cpu_fused_moe(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor? b13, "
            "Tensor? b2, Tensor weights, Tensor ids, bool skip_weighted, str act, str isa) -> ()",
            fused,
        ),
    ):
        library.define(schema)
        library.impl(schema[: schema.index("(")], function, "CompositeExplicitAutograd")


def platform() -> None:
    """vLLM's CPU platform, which it takes by itself in a build for CPUs only; with Triton by its
    interpreter, where such a build has a Triton for CPUs."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()


def main(request_path: str, answer_path: str) -> None:
    with open(request_path) as file:
        request = json.load(file)
    library = extension()
    experts(library)
    platform()
    calls = counted(winnow, ("write", "score_select", "attend", "compress"))
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        disable_log_stats=False,
        compilation_config={"custom_ops": ["none"]},
        **request["arguments"],
    )
    tokens = request["tokens"]
    greedy = SamplingParams(
        temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": p} for p in request["prompts"]]
    out = llm.generate(prompts, greedy, use_tqdm=False)
    answer = {
        "tokens": [list(o.outputs[0].token_ids) for o in out],
        "cached": [o.num_cached_tokens for o in out],
        "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
        "calls": calls,
        "metrics": {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")},
    }
    if request["scored"]:
        once = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
        scored = [{"prompt_token_ids": p} for p in request["scored"]]
        answer["logprobs"] = [
            [x[t].logprob for t, x in zip(p[1:], o.prompt_logprobs[1:], strict=True)]
            for p, o in zip(
                request["scored"], llm.generate(scored, once, use_tqdm=False), strict=True
            )
        ]
    with open(answer_path, "w") as file:
        json.dump(answer, file)
    del library


if __name__ == "__main__":
    main(*sys.argv[1:])
