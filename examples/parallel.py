"""A context spread over the ranks of a torch process group, verb by verb and by a plan:

    torchrun --nproc-per-node 4 examples/parallel.py

Each rank scores the keys that it holds; cut() finds its members of the row's top-k, exactly, and
combine() merges the attention of all ranks, each rank getting its own heads. A prefill over such a
layout then shares out its queries: a plan does all of it.
"""

import torch
import torch.distributed as dist

import winnow
from winnow.parallel import Communicator

TOKENS, CONTEXT, TOPK, HEADS, PAGE = 4, 4096, 256, 16, 64
RUN = 8  # consecutive positions on one rank: short runs share out a short prefill evenly


def decode(comm):
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


def prefill(comm, context=600, new=64, index_heads=4):
    """`new` tokens behind a prefix: [tokens of this rank, HEADS, 512] and their numbers."""
    world, rank = (comm.size, comm.rank) if comm else (1, 0)
    torch.manual_seed(1)
    kv, k = 0.2 * torch.randn(context, 576), torch.randn(context, 128)
    q, index_q = torch.randn(new, HEADS, 576), torch.randn(new, index_heads, 128)
    weights = torch.rand(new, index_heads)

    # The caches hold this rank's positions; -1: another rank writes it.
    positions = torch.arange(context)
    local = positions // (world * RUN) * RUN + positions % RUN
    slots = torch.where(positions // RUN % world == rank, local, -1)
    pages = (context // (world * RUN) + 1) * RUN // PAGE + 1
    table = torch.arange(pages, dtype=torch.int32).view(1, -1)
    cache, keys = (
        winnow.Cache(torch.zeros(winnow.cache_shape(f, pages, PAGE), dtype=torch.uint8), f, PAGE)
        for f in ("v32_fp8", "index_keys")
    )
    old = context - new
    winnow.write(kv[:old].bfloat16(), slots[:old], cache)
    winnow.write(k[:old].bfloat16(), slots[:old], keys)

    plan = winnow.Plan(
        heads=HEADS, topk=TOPK, index_heads=index_heads, page=PAGE, pages=pages, split="fixed",
        max_context=context, max_tokens=new, max_requests=1, comm=comm, interleave=RUN,
        spread="queries" if comm else "none", sharded=comm is not None,
    )  # fmt: skip
    plan.refill([0, new], [context])  # the whole batch, on every rank
    mine = winnow.shard_batch([0, new], [context], world=world, rank=rank, interleave=RUN)[2]
    # What the other ranks hold; an engine calls this a layer ahead.
    prefix = winnow.gather_prefix(plan, cache, table, keys, table) if comm else None
    out = winnow.pipeline(
        plan, q[mine].bfloat16(), kv[old:][mine].bfloat16(), slots[old:], cache, table,
        scale=0.1352, index_k=k[old:][mine].bfloat16(), index_slots=slots[old:], index_keys=keys,
        index_table=table, index_q=index_q[mine].to(torch.float8_e4m3fn),
        index_weights=weights[mine], prefix=prefix,
    )  # fmt: skip
    return out, mine


def main():
    dist.init_process_group("gloo")
    comm = Communicator()
    decode(comm)
    out, mine = prefill(comm)
    whole, _ = prefill(None)
    assert torch.equal(out, whole[mine]), "the outputs of one rank, bit for bit"
    print(f"rank {comm.rank} of {comm.size}: prefilled {len(mine)} of {len(whole)} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
