"""norm_write() and prepare_queries() against the single calls, bit for bit."""

import pytest
import torch

import winnow
from conftest import on
from test_layer_verbs import random, table_of


def fresh(*formats, device="cpu"):
    """A cache of one page of 8 zeros for each format."""
    return [
        winnow.Cache(
            torch.zeros(winnow.cache_shape(name, 1, 8), dtype=torch.uint8, device=device), name, 8
        )
        for name in formats
    ]


@on("norm_write")
def test_norm_write(device):
    """The bits of norm() and write(), with each part left out once."""
    table = table_of(device=device)
    wide = random(3, 1536 + 576).bfloat16().to(device)
    positions = torch.tensor([0, 7, 299], dtype=torch.int32, device=device)
    slots = torch.tensor([5, -1, 0], device=device)
    weight = random(1536, seed=1, device=device)
    turn = {"slots": slots, "positions": positions, "table": table}
    latents = {"kv": wide[:, 1536:2048], "rope": wide[:, 2048:], "norm": "rms", **turn}
    keys = {"kv": wide[:, :128], "norm": "layer", "slice": "first", "hadamard": True, **turn}
    want = winnow.norm(wide[:, :1536], weight, eps=1e-5)
    theirs = fresh("v32_fp8", "index_keys", device=device)
    winnow.write(**latents, cache=theirs[0])
    winnow.write(**keys, cache=theirs[1])
    ours = fresh("v32_fp8", "index_keys", device=device)
    queries = {"x": wide[:, :1536], "weight": weight, "eps": 1e-5}
    writes = [{**latents, "cache": ours[0]}, {**keys, "cache": ours[1]}]
    got = winnow.norm_write(norm=queries, write=writes)
    assert torch.equal(got, want)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.data.any() and torch.equal(mine.data, other.data)
    # Parts alone, rows in place, and two sets of rows.
    alone = fresh("v32_fp8", device=device)[0]
    assert winnow.norm_write(write={**latents, "cache": alone}) == ()
    assert torch.equal(alone.data, theirs[0].data)
    copies = [wide[:, :1536].clone(), wide[:, 1536:2048].clone()]
    first, second = winnow.norm_write(
        norm=[
            {"x": x, "norm": kind, "out": x}
            for x, kind in zip(copies, ["rms", "layer"], strict=True)
        ]
    )
    assert first is copies[0] and second is copies[1]
    assert torch.equal(first, winnow.norm(wide[:, :1536]))
    assert torch.equal(second, winnow.norm(wide[:, 1536:2048], norm="layer"))


@on("prepare_queries")
def test_prepare_queries(device):
    """The bits of prepare_query() and index_query(), with each part left out once."""
    table = table_of(device=device)
    positions = torch.tensor([0, 7, 299], dtype=torch.int32, device=device)
    turn = {"positions": positions, "table": table}
    query = {"q": random(3, 4, 512).bfloat16().to(device), "norm": "rms", **turn}
    index = {
        "q": random(3, 8, 128, seed=1).bfloat16().to(device),
        "weights": random(3, 8, seed=2, device=device),
        "factor": 0.03,
        "pairs": "half",
        "slice": "first",
        **turn,
    }
    want = winnow.prepare_query(**query), *winnow.index_query(**index)
    for got in (
        winnow.prepare_queries(query=query, index=index),
        (winnow.prepare_queries(query=query), *winnow.prepare_queries(index=index)),
    ):
        for mine, other in zip(got, want, strict=True):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_parts_of_a_call_are_named():
    rows = {"x": random(3, 128).bfloat16()}
    (cache,) = fresh("index_keys")
    keys = {**rows, "slots": torch.tensor([0, 1, 2]), "cache": cache}
    keys["kv"] = keys.pop("x")
    for error, match, parts in [
        (ValueError, "norm_write: norm: expected rows to normalise or to write", {}),
        (ValueError, r"norm_write: norm: expected .*at most 2, found 3", {"norm": [rows] * 3}),
        (TypeError, "norm_write: norm: expected a dict of arguments of norm", {"norm": 3}),
        (TypeError, "norm_write: write: expected a dict of arguments", {"write": [keys, None]}),
        (TypeError, r"write\(\) misses the argument 'cache'", {"write": {"kv": 1, "slots": 2}}),
        (TypeError, r"write\(\) got an unexpected keyword argument 'x'", {"write": {"x": 1}}),
        (TypeError, "takes names of arguments that are str", {"write": {3: 1}}),
        (ValueError, "norm_write: norm.kernel: expected none in a part of norm_write",
         {"norm": {**rows, "kernel": "simd"}}),
        (ValueError, r"norm_write: norm\[1\].weight: expected",
         {"norm": [rows, {**rows, "weight": torch.ones(7)}]}),
        (ValueError, r"norm_write: norm\[0\].weight: expected",
         {"norm": [{**rows, "weight": torch.ones(7)}]}),
        (ValueError, r"norm_write: write.scale: expected default, amax",
         {"write": {**keys, "scale": "none"}}),
        (ValueError, r"norm_write: write\[1\].slots: expected",
         {"write": [keys, {**keys, "slots": torch.tensor([8])}]}),
        (ValueError, r"norm_write: norm.out: expected",
         {"norm": {**rows, "out": cache.data.view(torch.bfloat16)[0, :384].view(3, 128)},
          "write": keys}),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            winnow.norm_write(**parts)
    assert not cache.data.any()
