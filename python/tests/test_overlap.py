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
