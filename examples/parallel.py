"""The top-k of a row, and attention over a context, spread over the ranks of a torch process group:

    torchrun --nproc-per-node 4 examples/parallel.py

Each rank scores the keys that it holds; cut() finds its members of the row's top-k, exactly, and
combine() merges the attention of all ranks, each rank getting its own heads.
"""

import torch
import torch.distributed as dist

import winnow
from winnow.parallel import Communicator

TOKENS, CONTEXT, TOPK, HEADS, PAGE = 4, 4096, 256, 16, 64


def main():
    dist.init_process_group("gloo")
    comm = Communicator()
    world, rank = comm.size, comm.rank
    torch.manual_seed(0)  # every rank draws the same numbers and keeps its part
    logits = torch.randn(TOKENS, CONTEXT)
    rows = 0.2 * torch.randn(CONTEXT, 576)
    q = torch.randn(TOKENS, HEADS, 576).bfloat16()

    # Position p lives on rank p // PAGE % world: a page stays on one rank.
    positions = torch.arange(CONTEXT)
    mine = positions[positions // PAGE % world == rank]
    pages = -(-max(len(mine), 1) // PAGE)
    memory = torch.zeros(winnow.cache_shape("v32_fp8", pages, PAGE), dtype=torch.uint8)
    cache = winnow.Cache(memory, "v32_fp8", PAGE)
    winnow.write(rows[mine].bfloat16(), torch.arange(len(mine)), cache)

    # In a model score_select(values=True) gives both, from the index keys that this rank holds.
    ids, values = winnow.select(logits[:, mine].contiguous(), TOPK, values=True)
    slots, counts, chosen = winnow.cut(
        ids, values, comm=comm, interleave=PAGE, counts=True, positions=True
    )
    assert torch.equal(chosen, winnow.select(logits, TOPK)), "the ids of one rank, bit for bit"

    partial = torch.empty(TOKENS, HEADS, 512)
    _, lse = winnow.attend(
        q,
        cache,
        slots,
        scale=0.1352,
        lengths=counts,
        out=partial,
        lse=True,
        empty_lse_negative=True,
    )
    out = winnow.combine(partial, lse, comm=comm)
    print(f"rank {rank} of {world}: attended to {counts.tolist()} of {TOPK}, out {list(out.shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
