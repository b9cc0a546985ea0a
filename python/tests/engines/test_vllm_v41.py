"""vLLM's own tests of DeepSeek V4.1's kernels, with winnow's verbs in the kernels' place.

VLLM_TESTS names the folder of vLLM 0.32's source archive, whose functions these are. They ask for a
GPU and run on the CPU here, in every case but those of CUDA graphs and of records that winnow does
not have (528, 288 and 68 bytes, rows of e4m3 with one scale). Of the tests that name V4.1, these
are not run: those of such records alone, of vLLM's own metadata and of its expanded block lists,
for which winnow has no call; `test_dspark_context_kv_matches_query_insert`, which compares two
compiled operators; `test_candidate_kernels_preserve_packed_bounds_and_padding`, which wants blocks
in torch.topk's order, with NaN first; `test_fused_indexer_q_rope_quant_matches_unfused`, whose
reference is a compiled operator (test_vllm_v4_kernels.py has that kernel).
"""

import importlib
import itertools
import os
import pathlib
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode
from versions import since

import winnow

SOURCES = pathlib.Path(os.environ.get("VLLM_TESTS", "missing"))
pytestmark = pytest.mark.skipif(
    not (SOURCES / "tests").is_dir() or not since(0, 32),
    reason="VLLM_TESTS names no source archive of vLLM 0.32 or later",
)
V41 = "vllm.models.deepseek_v41.common.ops"
CANDIDATES = "vllm.model_executor.kernels.attention.dsa.candidate_blocks"


class OnCpu(TorchFunctionMode):
    """What asks for a GPU gets the CPU.

    vLLM's reference of RoPE fuses a product with a sum, as its CUDA kernel does. winnow rounds both
    products (docs/layers.md), so here the reference does too.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.addcmul:
            return args[0] + args[1] * args[2]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, str) and a == "cuda" else a for a in args)
        return function(*args, **kwargs)


def theirs(module, name):
    """vLLM's test function, and every case it is marked with."""
    if str(SOURCES) not in sys.path:
        sys.path.insert(0, str(SOURCES))
    function = getattr(importlib.import_module(f"tests.{module}"), name)
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].replace(" ", "").split(",")
            values = [v if len(names) > 1 else (v,) for v in mark.args[1]]
            axes.append([dict(zip(names, v, strict=True)) for v in values])
    cases = [
        {k: v for part in parts for k, v in part.items()} for parts in itertools.product(*axes)
    ]
    left_out = ("use_graph", "use_fp4", "kv_mxfp8", "store_fp8")
    return function, [c for c in cases if not any(c.get(option) for option in left_out)]


def pages_of(cache, record):
    """A strided [pages, page, bytes] (or [pages, bytes]) cache of vLLM's as winnow takes it."""
    width = {"v4_fp8": 584, "v4_bf16": 512, "index_keys": 132}[record]
    page = cache.shape[1] if cache.dim() == 3 else cache.shape[1] // width
    flat = cache.as_strided((cache.shape[0], page * width), (cache.stride(0), 1))
    return winnow.Cache(flat, record, page)


def table_of(cos_sin):
    return cos_sin.float().view(len(cos_sin), 2, 32)


def closing(positions, slots, ratio):
    """Slots of tokens that close an entry, and where these begin."""
    positions = positions[: len(slots)].int()
    ends = (positions + 1) % ratio == 0
    return torch.where(ends, slots, -1), positions - (ratio - 1)


def save_compress_norm(
    raw, positions, state, slots, query_start_loc, requests, weight, eps, ratio, latent
):
    tokens = len(slots)
    rings = {}
    if ratio > 1:
        table = torch.full((len(query_start_loc) - 1, 1), -1, dtype=torch.int32)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                table[requests[token], 0] = slot // state.shape[1]
        rings = {"state": state, "state_table": table, "ring": True, "requests": requests.int()}
    winnow.compress(
        raw[:tokens],
        torch.where(slots >= 0, positions[:tokens], -1).int(),
        ratio=ratio,
        gate=ratio > 1,
        norm_weight=weight.float(),
        eps=eps,
        latent=latent[:tokens],
        **rings,
    )


def rope_insert(latent, positions, cos_sin, cache, slots, ratio, fp8_scale=None):
    slots, first = closing(positions, slots, ratio)
    quantised = cache.dtype == torch.uint8
    winnow.write(
        latent,
        slots,
        pages_of(cache, "v4_fp8" if quantised else "v4_bf16"),
        positions=first,
        table=table_of(cos_sin),
        scale="pow2_floor_amax" if quantised else "default",
    )


def index_key_store(k, positions, cos_sin, weight, eps, cache, slots, ratio, use_fp4):
    assert not use_fp4
    slots, first = closing(positions, slots, ratio)
    winnow.write(
        k,
        slots,
        pages_of(cache, "index_keys"),
        norm="rms",
        norm_weight=weight.float(),
        eps=eps,
        positions=first,
        table=table_of(cos_sin),
        scale="pow2",
    )


def prepared_queries(q, padded, kv, cache, slots, positions, cos_sin, eps, block, **options):
    assert not options.pop("apply_q_norm") and (slots < 0).all()
    out = torch.zeros(len(q), padded, 512, dtype=torch.bfloat16)
    winnow.prepare_query(
        q, positions.int(), table_of(cos_sin), norm="none", out=out[:, : q.shape[1]]
    )
    return out


def best_blocks(logits, starts, ends, topk, block, out, repeat=1):
    """Blocks are counted from a row's start; the newest comes first, as in vLLM."""
    starts = torch.zeros(len(logits), dtype=torch.int32) if starts is None else starts.int()
    lengths = ends.int().repeat_interleave(repeat) - starts
    shifted = torch.full(logits.shape, float("-inf"))
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        shifted[row, :length] = logits[row, start : start + length]
    _, best = winnow.select(shifted, 1, ends=lengths, best=topk, block=block)
    for row, length in enumerate(lengths.tolist()):
        newest = (length - 1) // block
        others = [b for b in best[row].tolist() if b >= 0 and b != newest]
        found = ([newest] if length > 0 else []) + others
        out[row] = torch.tensor(found + [-1] * (topk - len(found)), dtype=torch.int32)


def insert_keys(k, cache, slots, block_size):
    winnow.write(k, slots, pages_of(cache, "v4_fp8"), scale="pow2_floor_amax")


def gather_keys(out, cache, seq_lens, lens, table, block_size, offset, max_gather_len=None):
    lens = seq_lens if lens is None else lens
    rows = winnow.gather(
        pages_of(cache, "v4_fp8"), table, lens, starts=seq_lens - lens, rows=int(lens.sum())
    )
    out[0, offset : offset + len(rows)] = rows


COMPRESSOR = "kernels.test_compressor_kv_cache"
INDEXER = "kernels.test_fused_indexer_q_rope_quant"
SHORT = "model_executor.layers.test_mla_short_prefill_indexer"
QUERIES = "kernels.test_fused_deepseek_v4_qnorm_rope_kv_insert"
RUNS = [
    (
        COMPRESSOR,
        "test_v41_fused_save_compress_and_insert",
        {
            f"{V41}.fused_compress_quant_cache.fused_save_compress_norm": save_compress_norm,
            f"{V41}.fused_compress_quant_cache.rope_quant_insert": rope_insert,
        },
    ),
    (
        COMPRESSOR,
        "test_v41_rope_insert_plain_row",
        {f"{V41}.fused_compress_quant_cache.rope_quant_insert": rope_insert},
    ),
    (
        COMPRESSOR,
        "test_v41_fp8_gather_is_grid_width_invariant",
        {
            f"{V41}.quantize_and_insert_k_cache": insert_keys,
            f"{V41}.cache_utils.dequantize_and_gather_k_cache_triton": gather_keys,
        },
    ),
    (
        INDEXER,
        "test_indexer_k_inserts_only_valid_groups_into_padded_pages",
        {f"{V41}.indexer_k_store.indexer_k_norm_rope_store": index_key_store},
    ),
    (
        QUERIES,
        "test_q_path_without_qnorm_matches_rope_only_reference",
        {f"tests.{QUERIES}._call_fused": prepared_queries},
    ),
    (
        SHORT,
        "test_select_candidate_blocks_tolerates_empty_rows",
        {"vllm.model_executor.layers.sparse_attn_indexer._select_candidate_blocks": best_blocks},
    ),
    (
        SHORT,
        "test_candidate_selection_keeps_valid_blocks_with_nan_scores",
        {"vllm.model_executor.layers.sparse_attn_indexer._select_candidate_blocks": best_blocks},
    ),
]


@pytest.mark.parametrize("module,name,ours", RUNS, ids=[name for _, name, _ in RUNS])
def test_theirs(module, name, ours, monkeypatch):
    function, cases = theirs(module, name)
    for path, call in ours.items():
        monkeypatch.setattr(path, call)
    assert cases
    for case in cases:
        if "monkeypatch" in function.__code__.co_varnames[: function.__code__.co_argcount]:
            case["monkeypatch"] = monkeypatch
        with OnCpu():
            function(**case)
