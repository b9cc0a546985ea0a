"""Outputs that share memory with inputs or with each other, and views that only interleave."""

import re

import pytest
import torch

import winnow


def rows(*shape):
    return torch.randn(*shape).bfloat16()


def refused(message):
    return pytest.raises(ValueError, match="^" + re.escape(message))


def table():
    out = torch.empty(16, 2, 32)
    winnow.rope_table(out)
    return out


POSITIONS = torch.arange(4, dtype=torch.int32)


def test_a_shifted_view_is_no_output_of_norm():
    memory = rows(5, 64)
    before = memory.clone()
    with refused(
        "norm: out: expected x itself, or memory apart from it, found memory that overlaps"
    ):
        winnow.norm(memory[:4], out=memory[1:])
    assert torch.equal(memory, before)
    wanted = winnow.norm(memory[:4])
    assert torch.equal(winnow.norm(memory[:4], out=memory[:4]), wanted)


def test_columns_of_one_tensor_are_apart():
    memory = rows(4, 128)
    wanted = winnow.norm(memory[:, :64])
    assert torch.equal(winnow.norm(memory[:, :64], out=memory[:, 64:]), wanted)
    with refused("norm: out: expected x itself"):
        winnow.norm(memory[:, :64], out=memory[:, 63:127])


def test_heads_of_one_tensor_are_apart():
    memory, turn = rows(4, 6, 192), table()
    wanted = winnow.rotate(memory[:, ::2], POSITIONS, turn)
    assert torch.equal(winnow.rotate(memory[:, ::2], POSITIONS, turn, out=memory[:, 1::2]), wanted)
    with refused("rotate: out: expected x itself"):
        winnow.rotate(memory[:, :3], POSITIONS, turn, out=memory[:, 1:4])
    with refused("prepare_query: out: expected q itself"):
        winnow.prepare_query(memory[:, :3], POSITIONS, turn, out=memory[:, 1:4])
    # RoPE's part in place, and the absorbed rest into the front of it.
    query, w_uk = rows(4, 6, 576), rows(512, 6, 64)
    winnow.prepare_query(query[..., 512:], POSITIONS, turn, out=query[..., 512:])
    winnow.absorb_query(query[..., 512:], w_uk, out=query[..., :512])
    with refused("absorb_query: out: expected memory apart from q_nope"):
        winnow.absorb_query(query[..., 448:512], w_uk, out=query[..., :512])


def test_index_query_in_place_where_types_allow_it():
    q, weights = rows(4, 2, 128), torch.rand(4, 2)
    arguments = (weights, POSITIONS, table())
    wanted, _ = winnow.index_query(q, *arguments, bf16=True)
    with refused("index_query: out: expected q itself"):
        winnow.index_query(q, *arguments, out=q.view(torch.float8_e4m3fn)[..., :128])
    with refused("index_query: out_weights: expected memory apart from weights"):
        winnow.index_query(q, *arguments, bf16=True, out_weights=weights)
    assert torch.equal(winnow.index_query(q, *arguments, bf16=True, out=q)[0], wanted)


def test_attend_does_not_write_over_its_queries():
    kv, indices = rows(8, 512), torch.arange(8, dtype=torch.int32).expand(4, 8).contiguous()
    q = rows(4, 3, 512)
    arguments = {"cache": winnow.Cache(kv, "v4_bf16"), "indices": indices, "scale": 0.05}
    with refused("attend: out: expected memory apart from q,"):
        winnow.attend(q, **arguments, out=q)
    lse = torch.empty(4, 3)
    with refused("attend: lse: expected memory apart from max_logit"):
        winnow.attend(q, **arguments, lse=lse, max_logit=lse)
    with refused("attend_mha: out: expected memory apart from q"):
        winnow.attend_mha(q, q, q, scale=0.05, out=q)


def test_caches_are_memory_too():
    memory = rows(8, 512)
    cache = winnow.Cache(memory, "v4_bf16")
    with refused("write: cache: expected memory apart from kv"):
        winnow.write(memory[:2], torch.tensor([4, 5]), cache)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with refused("gather: out: expected memory apart from cache"):
        winnow.gather(cache, table, lengths, out=memory[5:])
    # What lies between the pages of a cache is not the cache's.
    wide = rows(8, 512 + 512)
    winnow.write(wide[:, 512:], torch.arange(8), winnow.Cache(wide[:, :512], "v4_bf16"))
    assert torch.equal(wide[:, :512], wide[:, 512:])


def test_lists_and_partial_results():
    logits = torch.randn(2, 50)
    with refused("select: out: expected memory apart from logits"):
        winnow.select(logits, 5, out=logits.view(torch.int32)[:, :5])
    partial, lse = torch.randn(3, 2, 4, 512), torch.randn(3, 2, 4)
    with refused("merge: out: expected memory apart from partial_out"):
        winnow.merge(partial, lse, out=partial[0])
    ids, pages = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    requests = torch.zeros(2, dtype=torch.int32)
    winnow.locate(ids, requests, pages, pages=1, out=ids)
    with refused("locate: out: expected ids itself"):
        winnow.locate(ids[:, :4], requests, pages, pages=1, out=ids[:, 2:6])
    x = rows(4, 64)
    with refused("quantize: out: expected memory apart from x"):
        winnow.quantize(x, out=x.view(torch.float8_e4m3fn).flatten()[:256].view(4, 64))
    with refused("join: out: expected memory apart from latent"):
        winnow.join(x[None, :, :32], x[None, :, 32:], out=x[None])


CACHES = {"cache": "v4_bf16", "keys": "index_keys"}


def calls():
    """A verb, what it reads and what it writes: correct calls of arrays that are apart."""
    q, pages, ids = rows(4, 2, 512), rows(8, 512), torch.zeros(4, 3, dtype=torch.int32)
    requests, ends = torch.zeros(4, dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    blocks, weights, lse = torch.zeros(1, 2, dtype=torch.int32), torch.rand(512), torch.zeros(4, 2)
    turned = {"positions": POSITIONS, "table": table()}
    normed = {"norm": "rms", "norm_weight": weights, "norm_bias": weights}
    yield "norm", {"x": rows(4, 512), "weight": weights, "norm_bias": weights}, {"out": pages[:4]}
    yield "rotate", {"x": q, **turned}, {"out": q}
    yield "prepare_query", {"q": q, **turned, **normed}, {"out": q}
    index = {"q": rows(4, 2, 128), "weights": torch.rand(4, 2), **turned}
    codes = torch.zeros(4, 2, 128, dtype=torch.uint8)
    yield "index_query", index, {"out": codes, "out_weights": lse}
    slots = torch.arange(4)
    yield "write", {"kv": rows(4, 512), "slots": slots, **turned, **normed}, {"cache": pages}
    compressed = {"rows": torch.rand(4, 1024), "requests": requests, "bias": torch.rand(4, 512)}
    compressed |= {"state_table": torch.zeros(1, 4, dtype=torch.int32), "slots": slots}
    outputs = {"state": torch.zeros(2, 8, 1024), "cache": pages, "latent": pages[:4]}
    yield "compress", compressed | turned | normed, outputs
    scored = {"q": codes, "weights": torch.rand(4, 2), "ends": ends, "starts": requests}
    rowed = {"key_rows": codes[:, 0], "key_scales": torch.rand(4), **scored}
    scored |= {"keys": torch.zeros(2, 64 * 132, dtype=torch.uint8), "block_table": blocks}
    scored |= {"requests": requests}
    yield "score", scored, {"out": torch.zeros(4, 128)}
    yield "score", rowed, {"out": torch.zeros(4, 4)}
    chosen = {"out": ids, "values": torch.zeros(4, 3), "best_blocks": ids}
    yield "score_select", {**scored, "within": ids}, chosen
    logits = {"logits": torch.rand(4, 9), "starts": requests, "ends": ends, "within": ids}
    yield "select", logits, chosen
    listed = {"q": q, "cache": pages, "indices": ids, "lengths": ends, "requests": requests}
    listed |= {"block_table": blocks, "sink": torch.rand(2), "scale": 0.1}
    yield "attend", listed, {"out": q, "lse": lse, "max_logit": lse}
    heads = {"q": q, "k": rows(9, 2, 512), "v": rows(9, 2, 512), "ids": ids, "starts": requests}
    heads |= {"mask": torch.ones(4, 9, dtype=torch.uint8), "bias": torch.rand(4, 9)}
    heads |= {"lengths": ends, "sink": torch.rand(2), "scale": 0.1}
    yield "attend_mha", heads, {"out": q, "lse": lse}
    lists = {"positions": POSITIONS, "requests": requests, "block_table": blocks, "pages": 2}
    yield (
        "c128a_lists",
        {**lists, "width": 128},
        {"out": torch.zeros(4, 128).int(), "lengths": ends},
    )
    yield "window_lists", lists, {"out": torch.zeros(4, 128).int(), "lengths": ends}


@pytest.mark.parametrize("verb, inputs, outputs", list(calls()))
def test_no_output_covers_what_a_call_reads(verb, inputs, outputs):
    def call(arrays):
        arrays = {n: winnow.Cache(a, CACHES[n]) if n in CACHES else a for n, a in arrays.items()}
        return getattr(winnow, verb)(**arrays)

    def fresh():
        whole = {**inputs, **outputs}
        return {n: a.clone() if isinstance(a, torch.Tensor) else a for n, a in whole.items()}

    call(fresh())
    for written in outputs:
        for read in inputs:
            arrays = fresh()
            if not isinstance(arrays[read], torch.Tensor):
                continue
            memory = torch.zeros(max(a.nbytes for a in (arrays[written], arrays[read])) + 8).byte()
            for name in (written, read):
                a = arrays[name]
                at = 8 if name == read else 0  # for views of another shape
                arrays[name] = memory[at : at + a.nbytes].view(a.dtype).view(a.shape).copy_(a)
            before = memory.clone()
            with pytest.raises(ValueError, match="memory apart from .*overlaps"):
                call(arrays)
            assert torch.equal(memory, before), (written, read)
