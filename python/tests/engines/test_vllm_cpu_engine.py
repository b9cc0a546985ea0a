"""The real vLLM engine on its CPU platform, which has no sparse attention without winnow."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tiny_models
from versions import since

# Before it vLLM's MLA layer needs a GPU's dense attention as well.
pytestmark = pytest.mark.skipif(
    not since(0, 32), reason="winnow serves vLLM's CPU platform from 0.32 on"
)
HERE = pathlib.Path(__file__).parent
# Fewer tokens a step than the prompts have, so that prefills come in chunks beside decodes.
ARGUMENTS = {
    "max_model_len": 320,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
}


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def model(request, tmp_path_factory):
    """A folder and what transformers answers; top-k above all lengths, so that bf16 decides."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, tiny_models.make(folder, request.param, topk=1024)


def run(folder, tmp_path, prompts=tiny_models.PROMPTS, scored=(), **arguments):
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(
        json.dumps(
            {
                "model": str(folder),
                "prompts": prompts,
                "scored": list(scored),
                "tokens": tiny_models.TOKENS,
                "arguments": {**ARGUMENTS, **arguments},
            }
        )
    )
    command = [sys.executable, HERE / "cpu_engine.py", request, answer]
    environment = {k: v for k, v in os.environ.items() if k != "WINNOW_VLLM"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(answer.read_text())


def distance(got, want):
    apart = [abs(a - b) for p, q in zip(got, want, strict=True) for a, b in zip(p, q, strict=True)]
    return sum(apart) / len(apart)


def scored(answers):
    return [p + a for p, a in zip(tiny_models.PROMPTS, answers, strict=True)]


def test_tokens_of_transformers(model, tmp_path):
    """Chunked prefill; then the same prompts again, most of which are found in the cache."""
    folder, want = model
    prompts = tiny_models.PROMPTS + tiny_models.PROMPTS
    got = run(folder, tmp_path, prompts, scored(want["answers"]), max_num_seqs=3)
    assert got["tokens"] == want["answers"] * 2
    assert got["cached"][4:] == [128, 256] and got["block_size"] == 64
    assert distance(got["logprobs"], want["logprobs"]) <= 0.01
    calls = got["calls"]
    # Where everything is chosen, nothing is scored; index keys are written all the same.
    assert "score_select" not in calls and calls["write"] == 2 * calls["attend"]


def test_choice(tmp_path_factory, tmp_path):
    """The longest prompt has a few tokens more than are chosen."""
    folder = tmp_path_factory.mktemp("deepseek_v32")
    want = tiny_models.make(folder, "deepseek_v32", topk=256)
    got = run(folder, tmp_path, scored=scored(want["answers"]))
    assert distance(got["logprobs"], want["logprobs"]) <= 2**-4
    assert 0 < got["calls"]["score_select"] < got["calls"]["attend"]


def test_preemption(model, tmp_path):
    """Four requests that fit until each needs a second page: some are thrown out and computed
    again, with the tokens that they have where pages abound."""
    folder, _ = model
    prompts = [tiny_models.PROMPTS[i][at : at + 62] for i in (1, 2) for at in (0, 30)]
    want = run(folder, tmp_path, prompts)
    assert want["metrics"]["vllm:num_preemptions"] == 0
    got = run(folder, tmp_path, prompts, num_gpu_blocks_override=6)
    assert got["metrics"]["vllm:num_preemptions"] > 0
    assert got["tokens"] == want["tokens"]


def test_fp8_cache(model, tmp_path):
    """Records of 656 bytes. e4m3 keeps 4 bits of a value: log probabilities move by some 2^-5."""
    folder, want = model
    got = run(folder, tmp_path, scored=scored(want["answers"]), kv_cache_dtype="fp8_ds_mla")
    assert distance(got["logprobs"], want["logprobs"]) <= 2**-4


@pytest.mark.parametrize("topk", [1024, 32])
def test_v4(tmp_path_factory, tmp_path, topk):
    """Layers of all three kinds, without AMX: all states, and a choice among up to 68. V4's caches
    are fp8, and which state is the last to be chosen may hang on it."""
    folder = tmp_path_factory.mktemp("deepseek_v4")
    want = tiny_models.make(folder, "deepseek_v4", topk=topk)
    got = run(folder, tmp_path, scored=scored(want["answers"]), max_num_seqs=3)
    assert distance(got["logprobs"], want["logprobs"]) <= 2**-4
    calls = got["calls"]
    # Three layers with a window each; one has two compressors, another one.
    assert calls["write"] == calls["compress"] == calls["attend"]
    # While there are fewer states than may be chosen, vLLM asks no indexer.
    assert ("score_select" in calls) == (topk == 32)
