"""A V4 layer in Python: a prefill and decode steps through winnow.pipeline.

A token attends to two lists under one softmax: the last 128 tokens (a sliding window), and
compressed states, one for every four tokens, of which the indexer picks the best. An engine would
get the tensors from its model; here they are random. examples/v4.cpp goes through the single verbs,
docs/layers.md begins at a layer's projections.
"""

import torch

import winnow

HEADS, INDEX_HEADS, WINDOW, PICKED, RATIO = 16, 8, 128, 64, 4
PAGE, PAGES = 64, 16
SCALE = 512**-0.5


def new_cache(form: str) -> winnow.Cache:
    memory = torch.zeros(winnow.cache_shape(form, PAGES, PAGE), dtype=torch.uint8)
    return winnow.Cache(memory, form, PAGE)


def main() -> None:
    torch.manual_seed(0)
    plan = winnow.Plan(
        model="v4", heads=HEADS, topk=WINDOW, extra_topk=PICKED, ratio=RATIO,
        index_heads=INDEX_HEADS, page=PAGE, pages=PAGES, max_requests=1, max_tokens=512,
    )  # fmt: skip
    tokens_seen, states, keys = new_cache("v4_fp8"), new_cache("v4_fp8"), new_cache("index_keys")
    table = torch.randperm(PAGES, dtype=torch.int32)[None]  # pages of the request, in order
    workspace = torch.empty(winnow.pipeline_workspace_bytes(plan), dtype=torch.uint8)
    print(f"winnow {winnow.__version__}, attend by {plan.kernel('attend')}")

    context = 0
    for tokens in (500, 1, 1, 1, 1):
        context += tokens
        plan.refill(query_starts=[0, tokens], seq_lens=[context])
        positions = torch.arange(context - tokens, context, dtype=torch.int32)
        requests = torch.zeros(tokens, dtype=torch.int32)
        # With a ratio of 1 every token has a slot of its own; with a ratio of 4 every fourth has
        # one, and the others get -1, which is skipped.
        place = {"page": PAGE, "pages": PAGES}
        slots = winnow.compressed_slots(positions, requests, table, ratio=1, **place)
        new_states = winnow.compressed_slots(positions, requests, table, ratio=RATIO, **place)
        out, lse = winnow.pipeline(
            plan,
            torch.randn(tokens, HEADS, 512).bfloat16(),
            torch.randn(tokens, 512).bfloat16(), slots, tokens_seen, table,
            scale=SCALE,
            compressed_kv=torch.randn(tokens, 512).bfloat16(), compressed_slots=new_states,
            compressed=states, compressed_table=table,
            index_k=torch.randn(tokens, 128).bfloat16(), index_slots=new_states, index_keys=keys,
            index_table=table,
            index_q=torch.randn(tokens, INDEX_HEADS, 128).to(torch.float8_e4m3fn),
            index_weights=torch.rand(tokens, INDEX_HEADS),
            sink=torch.zeros(HEADS), lse=True, workspace=workspace,
        )  # fmt: skip
        assert out.shape == (tokens, HEADS, 512) and torch.isfinite(lse).all()
        seen, kept = context // RATIO, min(context // RATIO, PICKED)
        print(
            f"{tokens:3} tokens, the last sees {min(context, WINDOW)} tokens of the window and "
            f"{kept} of {seen} states: lse of head 0 {lse[-1, 0]:.3f}"
        )


if __name__ == "__main__":
    main()
