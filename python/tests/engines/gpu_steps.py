"""Times, launches and memory of an engine's steps on a GPU: vLLM's model runner with a few layers
of DeepSeek V3.2's attention (real dimensions, random weights, small MLPs) over full caches.

    python gpu_steps.py fp8_ds_mla [LAYERS]                  # by winnow
    WINNOW_VLLM=0 python gpu_steps.py fp8_ds_mla [LAYERS]    # by vLLM alone

The steps are decodes of 1, 32 and 128 requests with 65,536 tokens each (in CUDA graphs), a chunk
of 4,096 tokens at the end of such a prompt, and a prompt of 2,048 tokens. Each request has pages
of its own, with random contents. The times are of whole steps, from metadata to hidden states.
"""

import collections
import json
import os
import sys
import tempfile
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
CONTEXT, PAGE, BATCHES, CHUNK, PROMPT = 65536, 64, (1, 32, 128), 4096, 2048
PAGES = max(BATCHES) * (CONTEXT // PAGE + 1) + 1
MIB = 1 << 20
MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 1024,
    "hidden_size": 7168,
    "intermediate_size": 2048,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def start(kv_cache_dtype: str, layers: int):
    """vLLM's model runner, with pages for every request; only decodes are captured."""
    from vllm import LLM

    folder = tempfile.mkdtemp()
    with open(folder + "/config.json", "w") as file:
        json.dump({**MODEL, "num_hidden_layers": layers, "first_k_dense_replace": layers}, file)
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=CONTEXT + PAGE,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=max(BATCHES),
        kv_cache_dtype=kv_cache_dtype,
        block_size=PAGE,
        num_gpu_blocks_override=PAGES,
        kv_cache_memory_bytes=4096 * MIB,
        gpu_memory_utilization=0.1,
        disable_log_stats=True,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "custom_ops": ["all"],
            "cudagraph_capture_sizes": list(BATCHES),
        },
    )
    worker = llm.llm_engine.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    # The engine lives as long as its runner.
    runner.engine_of_steps = llm
    return runner


def memory(runner) -> dict:
    import torch

    storages = {c.untyped_storage().data_ptr(): c.untyped_storage() for c in runner.kv_caches}
    caches = sum(s.nbytes() for s in storages.values())
    weights = sum(p.numel() * p.element_size() for p in runner.model.parameters())
    rest = torch.cuda.memory_allocated() - caches - weights
    return {
        name: n // MIB for name, n in (("caches", caches), ("weights", weights), ("rest", rest))
    }


def fill(runner) -> None:
    """Values without NaN under scales near those of real rows, and pages in random order."""
    import numpy as np
    import torch

    for cache in runner.kv_caches:
        if cache.dtype == torch.bfloat16:
            cache.normal_()
            continue
        data = cache.view(torch.uint8)
        data.random_(0, 256).bitwise_and_(0xBB)
        blocks, page, record = data.shape
        scale = torch.full((page * 4,), 0.02, device=data.device)
        if record == 656:
            data[..., 512:528].copy_(scale[:4].view(torch.uint8))
            rope = torch.randn(page, 64, device=data.device).bfloat16()
            data[..., 528:].copy_(rope.view(torch.uint8))
        else:
            flat = data.as_strided((blocks, page * record), (data.stride(0), 1))
            flat[:, page * 128 :].copy_(scale[:page].view(torch.uint8))
    order = np.random.default_rng(0).permutation(PAGES - 1) + 1
    for table in runner.input_batch.block_table.block_tables:
        rows = table.block_table.np
        columns = min(rows.shape[1], CONTEXT // PAGE)
        rows[:, :columns] = order[: rows.shape[0] * columns].reshape(-1, columns)


def steps(runner) -> dict:
    """Name -> a function that runs a step, and how often in a round."""

    def decode(batch):
        return lambda: runner._dummy_run(
            batch, uniform_decode=True, force_attention=True, profile_seq_lens=CONTEXT
        )

    def prefill(tokens, context):
        scheduler = runner.scheduler_config
        requests = scheduler.max_num_seqs

        def run():
            # One request has all tokens.
            scheduler.max_num_seqs = 1
            runner._dummy_run(tokens, force_attention=True, profile_seq_lens=context)
            scheduler.max_num_seqs = requests

        return run

    made = {f"decode {batch}": (decode(batch), 20) for batch in BATCHES}
    made[f"prompt {PROMPT}"] = (prefill(PROMPT, PROMPT), 5)
    made[f"chunk {CHUNK} of {CONTEXT}"] = (prefill(CHUNK, CONTEXT), 5)
    return made


def measure(step, times: int) -> dict:
    """The median of ten rounds of steps behind one another; of a step by itself, and of what the
    host takes to issue it; the launches of a step, and memory that a step takes and gives back.
    Kernels that wait for one another inside the GPU count with their waiting."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode():
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rounds = []
        for _ in range(10):
            at = time.perf_counter()
            for _ in range(times):
                step()
            torch.cuda.synchronize()
            rounds.append((time.perf_counter() - at) / times)
        peak = torch.cuda.max_memory_allocated() - before
        issued, alone = [], []
        for _ in range(20):
            at = time.perf_counter()
            step()
            issued.append(time.perf_counter() - at)
            torch.cuda.synchronize()
            alone.append(time.perf_counter() - at)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            step()
            torch.cuda.synchronize()
    kernels: collections.Counter = collections.Counter()
    copies, busy = 0, 0.0
    for event in seen.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if event.name.startswith("Mem"):
            copies += 1
        else:
            kernels[event.name] += 1
        busy += event.device_time_total
    return {
        "us": round(sorted(rounds)[5] * 1e6),
        "fastest us": round(min(rounds) * 1e6),
        "alone us": round(sorted(alone)[10] * 1e6),
        "host us": round(sorted(issued)[10] * 1e6),
        "kernels": sum(kernels.values()),
        "copies and fills": copies,
        "us of kernels": round(busy),
        "peak MiB": peak // MIB,
        "by name": kernels.most_common(40),
    }


def report(runner, name: str) -> dict:
    found = {"memory MiB": memory(runner)}
    print(name, found, flush=True)
    fill(runner)
    for what, (step, times) in steps(runner).items():
        found[what] = measure(step, times)
        shown = {k: v for k, v in found[what].items() if k != "by name"}
        print(name, what, shown, flush=True)
    return found


def main(kv_cache_dtype: str, layers: str = "3") -> None:
    who = "vLLM" if os.environ.get("WINNOW_VLLM") == "0" else "winnow"
    report(start(kv_cache_dtype, int(layers)), f"{who} {kv_cache_dtype}")


if __name__ == "__main__":
    main(*sys.argv[1:])
