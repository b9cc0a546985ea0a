"""winnow's planning and index stages against vLLM's builder and Triton kernels."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import ROUNDS, common_metadata, i32, lengths, same
from versions import since
from vllm.config import VllmConfig, set_current_vllm_config

import winnow

HEADS, TOPK, LONGEST = 64, 128, 1024
# Older versions shape their metadata in another way.
pytestmark = pytest.mark.skipif(not since(0, 32), reason="written against vLLM 0.32")


@pytest.fixture(scope="module")
def config():
    """A configuration of vLLM with what it reads of a V3.2 model, without the model."""
    text = SimpleNamespace(
        index_topk=TOPK,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        model_type="deepseek_v32",
    )
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        hf_config=text,
        hf_text_config=text,
        dtype=torch.bfloat16,
        max_model_len=LONGEST,
        get_num_attention_heads=lambda parallel_config: HEADS,
        model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS),
    )
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    config.cache_config.block_size = 64
    config.cache_config.cache_dtype = "fp8_ds_mla"
    config.scheduler_config.max_num_seqs = 64
    config.scheduler_config.max_num_batched_tokens = 4096
    config.compilation_config.static_forward_context["layer"] = SimpleNamespace(
        prefill_backend=None
    )
    return config


@pytest.fixture(scope="module")
def builder(config):
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadataBuilder
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        return FlashMLASparseMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def compare_prefills(meta, split, starts, sequence, rows, note):
    theirs = meta.fp8_extra_metadata.prefill
    same(theirs.request_ids, winnow.prefill_request_ids(starts, split.decodes), note)
    lens = np.asarray(sequence[split.decodes :], dtype=np.int32)
    chunks = winnow.prefill_chunks(lens, rows)
    ours = [
        (
            (chunk.first, chunk.last),
            int(lens[chunk.first : chunk.last].sum()),
            int(starts[split.decodes + chunk.first]),
            int(starts[split.decodes + chunk.last]),
        )
        for chunk in chunks
    ]
    same(
        [
            (
                (c.req_start_idx, c.req_start_idx + c.block_table.shape[0]),
                int(c.chunk_tot_seqlen),
                c.tokens_slice.start,
                c.tokens_slice.stop,
            )
            for c in theirs.chunks
        ],
        ours,
        note,
    )
    same(theirs.workspace_starts, winnow.workspace_starts(lens, chunks), note)


@torch.inference_mode()
def test_plan(config, builder):
    """Split, request ids, chunks and workspace of random batches."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import get_prefill_workspace_size

    rng = np.random.default_rng(0)
    rows, threshold = get_prefill_workspace_size(config), builder.reorder_batch_threshold
    for round_ in range(ROUNDS):
        prefills = int(rng.integers(0, 6)) + (round_ % 5 == 0)
        uniform = int(rng.choice([1, 1, 2, 4]))
        query, sequence = lengths(rng, int(rng.integers(0, 6)), prefills, uniform, context=400)
        if not query or round_ % 5 == 1:
            # A short extend among the decodes: whether all have one length decides.
            at = int(rng.integers(0, len(query) + 1))
            query.insert(at, int(rng.integers(1, threshold + 1)))
            sequence.insert(at, query[at] + 10)
        common = common_metadata(rng, query, sequence, 64, 400)
        with set_current_vllm_config(config):
            meta = builder.build(0, common)
        note = f"query {query} sequence {sequence} threshold {threshold}"
        starts = common.query_start_loc_cpu.numpy()
        split = winnow.split_batch(starts, threshold=threshold, uniform=True)
        same(
            [meta.num_decodes, meta.num_prefills, meta.num_decode_tokens],
            [split.decodes, split.prefills, split.decode_tokens],
            note,
        )
        same(meta.req_id_per_token[: starts[-1]], winnow.request_ids(starts), note)
        fp8 = meta.fp8_extra_metadata
        same(
            [fp8.num_decodes, fp8.num_prefill_tokens],
            [split.active_decodes, split.prefill_tokens],
            note,
        )
        if meta.num_prefills:
            compare_prefills(meta, split, starts, sequence, rows, note)


def test_prefill_chunks():
    from vllm.v1.attention.backends.utils import split_prefill_chunks

    rng = np.random.default_rng(1)
    for _ in range(5 * ROUNDS):
        lens = rng.integers(1, 900, int(rng.integers(1, 30))).astype(np.int32)
        rows = int(rng.integers(int(lens.max()), 4 * int(lens.max())))
        ours = [(c.first, c.last) for c in winnow.prefill_chunks(lens, rows)]
        same(split_prefill_chunks(torch.from_numpy(lens), rows), ours, f"{lens} {rows}")


@torch.inference_mode()
def test_locate():
    """Ids to slots: pages, pages with rows between them, a prefill workspace, ranks of a group."""
    from vllm.v1.attention.backends.mla.sparse_utils import (
        triton_convert_req_index_to_global_index as convert,
    )
    from vllm.v1.attention.backends.mla.sparse_utils import (
        triton_filter_and_convert_dcp_index as convert_dcp,
    )

    rng = np.random.default_rng(2)
    for _ in range(ROUNDS):
        tokens, requests = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        topk, page = int(rng.choice([128, 256, 384])), int(rng.choice([64, 128]))
        width, pages = int(rng.integers(2, 20)), 500
        table = i32(rng.integers(0, pages, (requests, width)))
        request = i32(rng.integers(0, requests, tokens))
        ids = i32(rng.integers(-1, width * page + 40, (tokens, topk)))
        note = f"tokens {tokens} topk {topk} page {page} width {width}"
        sizes = {"BLOCK_SIZE": page, "NUM_TOPK_TOKENS": topk}
        where = {"page": page, "pages": pages}
        same(
            convert(request, table, ids, **sizes), winnow.locate(ids, request, table, **where), note
        )
        stride = page + int(rng.integers(0, 3)) * 64
        got, valid = convert(
            request, table, ids, BLOCK_STRIDE_ROWS=stride, return_valid_counts=True, **sizes
        )
        ours, counts = winnow.locate(
            ids, request, table, rows_per_page=stride, compact=True, counts=True, **where
        )
        same(got, ours, note)
        same(valid, counts, note)
        # vLLM drops ids past the block table in a workspace too, winnow by the workspace's rows;
        # no indexer gives such ids.
        ids = ids.clamp(max=width * page - 1)
        prefill, starts = i32(rng.integers(-1, 3, tokens)), i32(np.sort(rng.integers(0, 5000, 3)))
        got, valid = convert(
            request,
            table,
            ids,
            HAS_PREFILL_WORKSPACE=True,
            prefill_workspace_request_ids=prefill,
            prefill_workspace_starts=starts,
            return_valid_counts=True,
            **sizes,
        )
        ours, counts = winnow.locate(
            ids,
            request,
            table,
            prefill_requests=prefill,
            workspace_starts=starts,
            workspace_rows=1 << 24,
            compact=True,
            counts=True,
            **where,
        )
        same(got, ours, note)
        same(valid, counts, note)
        world = int(rng.choice([2, 4, 8]))
        rank, interleave = int(rng.integers(0, world)), int(rng.choice([1, 2, 64]))
        far = i32(rng.integers(-1, width * page * world, (tokens, topk)))
        share = {"world": world, "rank": rank, "interleave": interleave}
        got = convert_dcp(
            request, table, far, world, rank, interleave, compact_valid_to_front=False, **sizes
        )
        same(got, winnow.locate(far, request, table, **share, **where), f"{note} {share}")
        got, valid = convert_dcp(
            request, table, far, world, rank, interleave, return_valid_counts=True, **sizes
        )
        ours, counts = winnow.locate(
            far, request, table, compact=True, counts=True, **share, **where
        )
        same(got, ours, f"{note} {share}")
        same(valid, counts, f"{note} {share}")
