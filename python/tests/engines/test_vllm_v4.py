"""winnow's V4 lists, slots, chunks and cache bytes against vLLM's own code."""

import numpy as np
import pytest
import torch
from batches import ROUNDS, common_metadata, i32, lengths, same
from versions import since

import winnow

WINDOW, TOPK, PAGES = 128, 512, 4000
# Older versions have other signatures.
pytestmark = pytest.mark.skipif(not since(0, 32), reason="written against vLLM 0.32")


@pytest.fixture(autouse=True)
def triton_only(monkeypatch):
    """vLLM has some of these kernels twice; the others need a GPU."""
    from vllm.models.deepseek_v4.common.ops import cache_utils

    monkeypatch.setattr(cache_utils, "has_cutedsl", lambda: False)


class Batch:
    def __init__(self, rng):
        self.query, self.sequence = [], []
        while not self.query:
            self.query, self.sequence = lengths(
                rng, int(rng.integers(0, 4)), int(rng.integers(0, 3)), context=900, longest=40
            )
        # Pages of 8 tokens, so that the table has columns enough for any ratio.
        self.common = common_metadata(rng, self.query, self.sequence, 8, PAGES)
        self.tokens = self.common.num_actual_tokens
        self.table = self.common.block_table_tensor
        self.requests = i32(np.repeat(np.arange(len(self.query)), self.query))
        self.positions = self.common.positions.to(torch.int32)
        longer = [i for i, n in enumerate(self.query) if n != 1]
        self.decodes = longer[0] if longer else len(self.query)
        self.decode_tokens = int(self.common.query_start_loc_cpu[self.decodes])
        self.note = f"query {self.query} sequence {self.sequence}"
        self.where = (self.positions, self.requests, self.table)


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(3)
    return [Batch(rng) for _ in range(ROUNDS)]


def empty(*shape):
    """What no kernel leaves behind, as far as it was asked for."""
    return torch.full(shape, -7, dtype=torch.int32)


@pytest.mark.parametrize(("ratio", "page"), [(4, 64), (128, 2)])
@torch.inference_mode()
def test_compressed_slots(batches, ratio, page):
    from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping

    for b in batches:
        c = b.common
        theirs = get_compressed_slot_mapping(
            b.tokens, c.slot_mapping, c.query_start_loc, c.seq_lens, b.table, page, ratio
        )
        ours = winnow.compressed_slots(*b.where, ratio=ratio, page=page, pages=PAGES)
        same(theirs, ours, b.note)


@torch.inference_mode()
def test_c128a_lists(batches):
    from vllm.models.deepseek_v4.sparse_mla import build_c128a_topk_metadata

    for b in batches:
        decode, lens, prefill = build_c128a_topk_metadata(
            b.common.positions,
            128,
            b.decode_tokens,
            b.requests,
            b.table,
            2,
            b.common.slot_mapping,
            empty(b.tokens, 128),
            empty(b.tokens),
            empty(b.tokens, 128),
            max_compressed_tokens=128,
        )
        lists, counts = winnow.c128a_lists(
            *b.where, width=128, ratio=128, page=2, pages=PAGES, decode_tokens=b.decode_tokens
        )
        same(decode, lists[: b.decode_tokens], b.note)
        same(lens, counts[: b.decode_tokens], b.note)
        same(prefill, lists[b.decode_tokens :], b.note)


@torch.inference_mode()
def test_window_lists(batches):
    from vllm.v1.attention.backends.mla.sparse_swa import ComputeSWAIndicesAndLensKernel

    for b in batches:
        theirs, lens = empty(b.tokens, WINDOW), empty(b.tokens)
        none = torch.zeros(b.tokens, dtype=torch.int32)
        ComputeSWAIndicesAndLensKernel()(
            theirs,
            lens,
            WINDOW,
            WINDOW,
            none,
            none,
            b.common.query_start_loc,
            b.common.seq_lens,
            b.requests,
            torch.ones(b.tokens, dtype=torch.bool),
            b.table,
            8,
            torch.zeros(len(b.query), dtype=torch.int32),
            num_tokens=b.tokens,
            token_offset=0,
        )
        lists, counts = winnow.window_lists(*b.where, window=WINDOW, page=8, pages=PAGES)
        same(theirs, lists, b.note)
        same(lens, counts, b.note)


def c4a_ids(b, rng):
    """A choice among the compressed states that each token sees."""
    ids = torch.full((b.tokens, TOPK), -1, dtype=torch.int32)
    for token, position in enumerate(b.positions.tolist()):
        states = (position + 1) // 4
        count = min(TOPK, states)
        ids[token, :count] = i32(np.sort(rng.permutation(states)[:count]))
    return ids


@torch.inference_mode()
def test_c4a(batches):
    """Local ids to slots for decodes, and the lists of a prefill chunk."""
    from vllm.models.deepseek_v4.common.ops import cache_utils

    rng = np.random.default_rng(4)
    for b in batches:
        ids = c4a_ids(b, rng)
        valid = torch.ones(b.tokens, dtype=torch.bool)
        theirs, lens = cache_utils.compute_global_topk_indices_and_lens(
            ids, b.requests, b.table, 64, valid
        )
        ours, counts = winnow.locate(ids, b.requests, b.table, page=64, pages=PAGES, counts=True)
        same(theirs, ours, b.note)
        same(lens, counts, b.note)
        if b.decodes == len(b.query):
            continue
        first = b.decode_tokens
        query, sequence = (np.asarray(x[b.decodes :], np.int32) for x in (b.query, b.sequence))
        reach = query + np.minimum(sequence - query, WINDOW - 1)
        compressed = int((sequence // 4).max())
        rows = compressed + int(reach.max())
        starts = (b.common.query_start_loc[b.decodes :] - first).contiguous()
        theirs, lens = cache_utils.combine_topk_swa_indices(
            ids[first:], starts, i32(sequence), i32(reach), WINDOW, 4, TOPK, rows, compressed
        )
        ours, counts = winnow.combined_lists(
            ids[first:],
            b.positions[first:],
            b.requests[first:] - b.decodes,
            i32(sequence),
            i32(reach),
            compressed=compressed,
            rows=rows,
            ratio=4,
            window=WINDOW,
        )
        same(lens, counts, b.note)
        for token, count in enumerate(lens.tolist()):
            # Behind its length a row of theirs holds anything.
            same(theirs[token, :count], ours[token, :count], b.note)


@torch.inference_mode()
def test_prefill_chunks(batches):
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

    for b in batches:
        query, sequence = (np.asarray(x[b.decodes :], np.int32) for x in (b.query, b.sequence))
        if len(query) == 0:
            continue
        for ratio in (1, 4, 128):
            meta = DeepseekSparseSWAMetadata(
                block_table=b.table,
                slot_mapping=b.common.slot_mapping,
                block_size=64,
                num_prefills=len(query),
                prefill_seq_lens_cpu=torch.from_numpy(sequence),
                prefill_query_lens_cpu=torch.from_numpy(query),
                prefill_window_size=WINDOW,
                prefill_max_model_len=2000,
                prefill_max_num_batched_tokens=256,
            )
            ours = winnow.v4_prefill_chunks(
                query,
                sequence,
                max_model_len=2000,
                max_batched_tokens=256,
                # One token a state is vLLM's word for no states beside the window.
                ratio=ratio if ratio > 1 else 0,
                window=WINDOW,
            )
            same(
                meta.get_prefill_chunk_plan(ratio, 4),
                [(c.first, c.last, c.compressed, c.rows) for c in ours],
                f"{b.note} ratio {ratio}",
            )


@pytest.mark.parametrize("page", [2, 64])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
@torch.inference_mode()
def test_cache_bytes(page, size):
    """vLLM's V4 writer is scale="pow2_floor_amax", byte for byte; both read back the same."""
    from vllm.models.deepseek_v4.common.ops import cache_utils

    rng = np.random.default_rng(5)
    pages = 6
    tokens = min(30, page * pages)
    k = (torch.from_numpy(rng.standard_normal((tokens, 512)).astype(np.float32)) * size).bfloat16()
    slots = torch.from_numpy(rng.permutation(page * pages)[:tokens].astype(np.int64))
    shape = winnow.cache_shape("v4_fp8", pages, page)
    theirs, ours = (torch.zeros(shape, dtype=torch.uint8) for _ in range(2))
    cache_utils.quantize_and_insert_k_cache(k, theirs, slots, block_size=page)
    winnow.write(k, slots, winnow.Cache(ours, "v4_fp8", page), scale="pow2_floor_amax")
    assert torch.equal(theirs, ours)
    rows = page * pages
    table = i32(rng.permutation(pages)[None])
    read = torch.zeros(1, rows, 512, dtype=torch.bfloat16)
    view = theirs.as_strided((pages, page, 584), (shape[1], 584, 1))
    cache_utils.dequantize_and_gather_k_cache(read, view, i32([rows]), None, table, page, 0)
    cache = winnow.Cache(theirs, "v4_fp8", page)
    assert torch.equal(read[0], winnow.gather(cache, table, i32([rows]), rows=rows))
