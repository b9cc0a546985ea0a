"""Tiny models of the three families, with real head sizes, in vLLM's engine on a GPU: greedy tokens
and log probabilities, beside those of transformers.

    python gpu_engine.py FOLDER CASE...                  # by winnow
    WINNOW_VLLM=0 python gpu_engine.py FOLDER CASE...    # by vLLM alone
    python gpu_engine.py FOLDER compare                  # what both left in FOLDER
    python gpu_engine.py pairs CASE FOLDER...            # the same over models of several seeds

A case is family:topk:cache[:graphs], such as deepseek_v32:2048:fp8_ds_mla. Each runs in an engine
of its own, one after another. Prompts go through in chunks of 256 tokens, with prefix caching.
TINY_SEED is the seed of the weights, of models that are made in a new folder.
ONLY=indexer and ONLY=attention take one half from winnow and the other from vLLM.
"""

import gc
import json
import os
import pathlib
import random
import statistics
import sys
import types

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

CHUNK, TOKENS = 256, 12
PROMPTS = [
    list(range(2, 40)),
    [7 * i % 500 + 2 for i in range(150)],
    [3 * i % 400 + 5 for i in range(260)],
    [11 * i % 480 + 3 for i in range(700)],
]
# V4 chooses among states of four tokens, at least 512 of them.
LONG_PROMPT = [13 * i % 490 + 3 for i in range(2600)]
_draw = random.Random(5)
RANDOM_PROMPTS = [[_draw.randrange(2, 510) for _ in range(1500)] for _ in range(3)]
WHO = "vLLM" if os.environ.get("WINNOW_VLLM") == "0" else "winnow"


def prompts_of(family: str) -> list:
    return [*PROMPTS, LONG_PROMPT, *RANDOM_PROMPTS] if family == "deepseek_v4" else PROMPTS


def make_model(folder: pathlib.Path, family: str, topk: int) -> pathlib.Path:
    """The checkpoint, and log probabilities of the prompts by transformers, in fp32 and in bf16."""
    path = folder / f"{family}-{topk}"
    if (path / "reference.json").exists():
        return path
    import tiny_models
    import torch

    # DeepGEMM takes 16, 32 or 64 index heads.
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "index_n_heads": 32}
    tiny_models._V32.update(qk_nope_head_dim=128, v_head_dim=128, **heads)
    tiny_models._GLM.update(qk_nope_head_dim=192, v_head_dim=256, **heads)
    tiny_models._V4.update(index_n_heads=32)
    tiny_models.PROMPTS = []
    scale = float(os.environ.get("TINY_SCALE", "2"))
    seed = int(os.environ.get("TINY_SEED", "0"))
    model = tiny_models.make(path, family, topk, scale=scale, seed=seed)["model"]
    model = model.cuda().eval()
    found = {}
    with torch.no_grad():
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            found[name] = []
            for prompt in prompts_of(family):
                ids = torch.tensor([prompt]).cuda()
                logits = model.to(dtype)(ids).logits[0].float()
                rows = torch.log_softmax(logits, -1)[:-1]
                found[name].append(rows.gather(1, ids[0, 1:, None])[:, 0].tolist())
    (path / "reference.json").write_text(json.dumps(found))
    return path


def without_tilelang_and_cutedsl() -> None:
    """What stands around V4's attention in vLLM and needs packages of its own, in PyTorch and
    Triton, for vLLM alone and for winnow: the mixing of residual streams; the compressors, which
    vLLM has in Triton as well; the output projection, for weights that are not fp8. And angles by
    the configuration that transformers writes, which vLLM reads since 0.29."""
    import torch
    from vllm.model_executor.kernels.mhc import tilelang
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch

    def normalised(x, weight, eps):
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).bfloat16()

    def pre(residual, *args, norm_weight=None, norm_eps=1e-6, **more):
        post_mix, res_mix, x = mhc_pre_torch(residual.contiguous(), *args)
        return post_mix, res_mix, normalised(x, norm_weight, norm_eps)

    def pre_broadcast(x, fn, *args, fn_broadcast=None, **norm):
        residual = x.unsqueeze(1).repeat(1, fn.shape[1] // x.shape[1], 1)
        return (residual, *pre(residual, fn, *args, **norm))

    def post_pre(x, residual, post_mix, res_mix, *args, n_splits=1, tile_n=1, **norm):
        residual = mhc_post_torch(x, residual, post_mix, res_mix)
        return (residual, *pre(residual, *args, **norm))

    def head(streams, fn, scale, base, rms_norm_eps, hc_eps):
        flat = streams.flatten(1).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_norm_eps)
        gate = torch.sigmoid(flat @ fn.T * scale + base) + hc_eps
        return (gate.unsqueeze(-1) * streams).sum(1).to(streams.dtype)

    tilelang.mhc_pre_tilelang = pre
    tilelang.mhc_pre_broadcast_tilelang = pre_broadcast
    tilelang.mhc_fused_post_pre_tilelang = post_pre
    tilelang.mhc_post_tilelang = mhc_post_torch
    tilelang.hc_head_fused_kernel_tilelang = head

    # Not before: this imports V4's model, which takes the functions above.
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.models.deepseek_v4 import attention
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import (
        compress_norm_rope_store_triton,
    )
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

    def rope(config, *, head_dim, rope_head_dim, max_position_embeddings, compress_ratio):
        parameters = {
            "rope_type": "deepseek_yarn",
            "factor": 1.0,
            "original_max_position_embeddings": max_position_embeddings,
            "rope_theta": config.compress_rope_theta if compress_ratio > 1 else config.rope_theta,
            "mscale": 0,
            "mscale_all_dim": 0,
            "is_deepseek_v4": True,
            "rope_dim": rope_head_dim,
        }
        return get_rope(
            head_dim,
            max_position=max_position_embeddings,
            rope_parameters=parameters,
            is_neox_style=False,
        )

    attention.build_deepseek_v4_rope = rope

    def compress(*args, store_full_kv=None, store_full_fp8=None, fp8_scale=None, **kwargs):
        return compress_norm_rope_store_triton(*args, **kwargs)

    name = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].compress_norm_rope_store_cutedsl = compress

    def project(self, o, positions):
        angles = self.rotary_emb.cos_sin_cache[positions].float()
        cos, sin = (x.unsqueeze(1) for x in angles.chunk(2, -1))
        nope, rope = o.float().split([448, 64], -1)
        even, odd = rope.unflatten(-1, (-1, 2)).unbind(-1)
        rope = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)
        o = torch.cat([nope, rope], -1).bfloat16()
        groups = o.reshape(o.shape[0], self.n_local_groups, -1)
        weight = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
        return self.wo_b(torch.einsum("tgr,gdr->tgd", groups, weight).flatten(1))

    DeepseekV4FlashMLAAttention._o_proj = project


def one_half() -> None:
    from winnow.engines import vllm as plugin

    if os.environ.get("ONLY") == "indexer":
        plugin._BACKENDS.clear()
    elif os.environ.get("ONLY") == "attention":
        plugin._replace_indexer = lambda: None


def run(folder: pathlib.Path, case: str) -> None:
    import torch
    from vllm import LLM, SamplingParams

    one_half()

    family, topk, cache, *graphs = case.split(":")
    path = make_model(folder, family, int(topk))
    if family == "deepseek_v4":
        without_tilelang_and_cutedsl()
    llm = LLM(
        model=str(path),
        skip_tokenizer_init=True,
        enforce_eager=not graphs,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=8,
        block_size=256 if family == "deepseek_v4" else 64,
        kv_cache_dtype=cache,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=512 << 20,
        disable_log_stats=True,
        compilation_config={
            "mode": 0,
            "custom_ops": ["all"],
            **({"cudagraph_mode": "FULL_DECODE_ONLY"} if graphs else {}),
        },
        **json.loads(os.environ.get("LLM_ARGUMENTS", "{}")),
    )
    prompts = [{"prompt_token_ids": p} for p in prompts_of(family)]
    greedy = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        min_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
    )
    out = llm.generate(prompts, greedy, use_tqdm=False)
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    scored = llm.generate(prompts, once, use_tqdm=False)
    tokens = [list(o.outputs[0].token_ids) for o in out]
    answer = {
        "tokens": tokens,
        "decoded": [
            [x[t].logprob for t, x in zip(ids, o.outputs[0].logprobs, strict=True)]
            for ids, o in zip(tokens, out, strict=True)
        ],
        "logprobs": [
            [x[t].logprob for t, x in zip(p[1:], o.prompt_logprobs[1:], strict=True)]
            for p, o in zip(prompts_of(family), scored, strict=True)
        ],
    }
    name = case.replace(":", "-") + os.environ.get("SUFFIX", "")
    (folder / f"{WHO} {name}.json").write_text(json.dumps(answer))
    print(WHO, case, "done", flush=True)
    del llm
    gc.collect()
    torch.accelerator.empty_cache()


def mean(a: list, b: list) -> float:
    pairs = [(x, y) for u, v in zip(a, b, strict=True) for x, y in zip(u, v, strict=True)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def compare(folder: pathlib.Path) -> None:
    for ours in sorted(folder.glob("winnow *.json")):
        name = ours.stem.removeprefix("winnow ")
        a = json.loads(ours.read_text())
        family, topk = name.split("-")[:2]
        want = json.loads((folder / f"{family}-{topk}" / "reference.json").read_text())
        line = [f"{name:40}", f"winnow-transformers {mean(a['logprobs'], want['bf16']):.4f}"]
        line.append(f"transformers fp32-bf16 {mean(want['fp32'], want['bf16']):.4f}")
        theirs = folder / f"vLLM {name}.json"
        if theirs.exists():
            b = json.loads(theirs.read_text())
            same = sum(x == y for u, v in zip(a["tokens"], b["tokens"], strict=True)
                       for x, y in zip(u, v, strict=True))  # fmt: skip
            line.insert(1, f"winnow-vLLM {mean(a['logprobs'], b['logprobs']):.4f}")
            line.append(f"vLLM-transformers {mean(b['logprobs'], want['bf16']):.4f}")
            line.append(f"tokens {same}/{TOKENS * len(a['tokens'])}")
        print("  ".join(line))


def pairs(case: str, *folders: str) -> None:
    """Distances from transformers, winnow's less vLLM's, of the same positions: the mean over
    models, its standard error and their quotient."""
    name = case.replace(":", "-")
    family, topk = case.split(":")[:2]
    for precision in ("bf16", "fp32"):
        ours, theirs = [], []
        for folder in map(pathlib.Path, folders):
            want = json.loads((folder / f"{family}-{topk}" / "reference.json").read_text())
            for who, found in (("winnow", ours), ("vLLM", theirs)):
                suffix = os.environ.get("SUFFIX", "") if who == "winnow" else ""
                answer = json.loads((folder / f"{who} {name}{suffix}.json").read_text())
                found.append(mean(answer["logprobs"], want[precision]))
        less = [x - y for x, y in zip(ours, theirs, strict=True)]
        error = statistics.stdev(less) / len(less) ** 0.5
        print(
            f"{name} from transformers in {precision}, {len(less)} models: "
            f"winnow {statistics.mean(ours):.5f}, vLLM {statistics.mean(theirs):.5f}, "
            f"difference {statistics.mean(less):+.6f} +- {error:.6f}, "
            f"t {statistics.mean(less) / error:+.2f}"
        )


def main(folder: str, *cases: str) -> None:
    if folder == "pairs":
        return pairs(*cases)
    path = pathlib.Path(folder)
    path.mkdir(exist_ok=True)
    if cases == ("compare",):
        return compare(path)
    for case in cases:
        try:
            run(path, case)
        except Exception as error:
            import traceback

            traceback.print_exc()
            print(WHO, case, "failed:", type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
