"""Random batches of requests as vLLM describes them, for comparing its planning with winnow's."""

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

ROUNDS = 80


def i32(values) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32)


def lengths(rng, decodes, prefills, uniform=1, context=600, longest=300):
    """Query and sequence lengths: decodes of `uniform` tokens first, then prefills."""
    query = [uniform] * decodes + [int(rng.integers(2, longest)) for _ in range(prefills)]
    return query, [n + int(rng.integers(0, context)) for n in query]


def common_metadata(rng, query, sequence, page, pages) -> CommonAttentionMetadata:
    starts = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    width = max(1, -(-max(sequence) // page))
    table = np.stack([rng.permutation(pages)[:width] for _ in query])
    tokens = int(starts[-1])
    positions = [torch.arange(b - a, b) for a, b in zip(query, sequence, strict=True)]
    return CommonAttentionMetadata(
        query_start_loc=i32(starts),
        query_start_loc_cpu=i32(starts),
        seq_lens=i32(sequence),
        seq_lens_cpu_upper_bound=i32(sequence),
        num_reqs=len(query),
        num_actual_tokens=tokens,
        max_query_len=max(query),
        max_seq_len=max(sequence),
        block_table_tensor=i32(table),
        slot_mapping=torch.arange(tokens, dtype=torch.int64),
        causal=True,
        positions=torch.cat(positions),
    )


def same(theirs, ours, note: str) -> None:
    """Equal element by element, whatever holds them."""
    theirs = theirs.tolist() if hasattr(theirs, "tolist") else list(theirs)
    ours = ours.tolist() if hasattr(ours, "tolist") else list(ours)
    assert theirs == ours, note


# Two decodes and two chunks of prefills; then what pads the batch of a CUDA graph.
QUERY, SEQUENCE, PADDING = [1, 1, 5, 20], [70, 3, 5, 150], 4


def padded_metadata(page, pages) -> CommonAttentionMetadata:
    """The batch above, with the slots of its new tokens."""
    starts = i32(np.concatenate([[0], np.cumsum(QUERY)]))
    table = np.random.default_rng(1).permutation(pages)[: len(QUERY) * 3].reshape(len(QUERY), 3)
    slots = [
        table[request][position // page] * page + position % page
        for request, (query, sequence) in enumerate(zip(QUERY, SEQUENCE, strict=True))
        for position in range(sequence - query, sequence)
    ]
    slots += [-1] * PADDING
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=i32(SEQUENCE),
        num_reqs=len(QUERY),
        num_actual_tokens=len(slots),
        max_query_len=max(QUERY),
        max_seq_len=max(SEQUENCE),
        block_table_tensor=i32(table),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )
