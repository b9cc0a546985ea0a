"""norm_write() and prepare_queries(): the single calls' bits, as operators, and in the layers."""

import pytest
import torch

import test_layers
import test_v41
import winnow
from conftest import on
from test_layer_verbs import random, table_of
from winnow.torch import LayerCaches, MlaConfig, MlaLayer, ops


def fresh(*formats, device="cpu"):
    """A cache of one page of 8 zeros for each format."""
    return [
        winnow.Cache(
            torch.zeros(winnow.cache_shape(name, 1, 8), dtype=torch.uint8, device=device), name, 8
        )
        for name in formats
    ]


def turn_of(device):
    positions = torch.tensor([0, 7, 299], dtype=torch.int32, device=device)
    return {"positions": positions, "table": table_of(device=device)}


def rows_of(device):
    """V3.2's first projections: arguments of norm(), and those of write() but for the cache."""
    wide = random(3, 1536 + 576).bfloat16().to(device)
    slots = torch.tensor([5, -1, 0], device=device)
    queries = {"x": wide[:, :1536], "weight": random(1536, seed=1, device=device), "eps": 1e-5}
    latents = {"kv": wide[:, 1536:2048], "rope": wide[:, 2048:], "slots": slots, "norm": "rms"}
    keys = {"kv": wide[:, :128], "slots": slots, "norm": "layer", "slice": "first"}
    return queries, latents | turn_of(device), {**keys, "hadamard": True, **turn_of(device)}


def queries_of(device):
    """Arguments of prepare_query() and of index_query()."""
    query = {"q": random(3, 4, 512).bfloat16().to(device), "norm": "rms"}
    index = {
        "q": random(3, 8, 128, seed=1).bfloat16().to(device),
        "weights": random(3, 8, seed=2, device=device),
        "factor": 0.03,
        "pairs": "half",
        "slice": "first",
    }
    return query | turn_of(device), index | turn_of(device)


def single_calls(queries, latents, keys):
    """What norm_write() is the same as: the normalised rows, and both caches."""
    caches = fresh("v32_fp8", "index_keys", device=latents["kv"].device)
    for part, cache in zip((latents, keys), caches, strict=True):
        winnow.write(**part, cache=cache)
    return winnow.norm(**queries), caches


@on("norm_write")
def test_norm_write(device):
    """The bits of norm() and write(), with each part left out once."""
    queries, latents, keys = rows_of(device)
    wide = queries["x"]
    want, theirs = single_calls(queries, latents, keys)
    ours = fresh("v32_fp8", "index_keys", device=device)
    writes = [{**latents, "cache": ours[0]}, {**keys, "cache": ours[1]}]
    got = winnow.norm_write(norm=queries, write=writes)
    assert torch.equal(got, want)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.data.any() and torch.equal(mine.data, other.data)
    # Parts alone, rows in place, and two sets of rows.
    alone = fresh("v32_fp8", device=device)[0]
    assert winnow.norm_write(write={**latents, "cache": alone}) == ()
    assert torch.equal(alone.data, theirs[0].data)
    copies = [wide.clone(), latents["kv"].clone()]
    first, second = winnow.norm_write(
        norm=[
            {"x": x, "norm": kind, "out": x}
            for x, kind in zip(copies, ["rms", "layer"], strict=True)
        ]
    )
    assert first is copies[0] and second is copies[1]
    assert torch.equal(first, winnow.norm(wide))
    assert torch.equal(second, winnow.norm(latents["kv"], norm="layer"))


def with_prefix(prefix, arguments):
    """An operator's arguments of one part; all parts have the same positions and table."""
    return {prefix + n: x for n, x in arguments.items() if n not in ("x", "positions", "table")}


@on("norm_write")
def test_operator_of_norm_write(device):
    """Both records, and the first alone."""
    queries, latents, keys = rows_of(device)
    want, theirs = single_calls(queries, latents, keys)
    common = {"x": queries["x"], **with_prefix("x_", queries), **latents, "format": "v32_fp8"}
    index = {**with_prefix("index_", keys), "index_page": 8}
    for also in (index, {}):
        pages, index_pages = (c.data for c in fresh("v32_fp8", "index_keys", device=device))
        index_cache = index_pages if also else None
        got = ops.norm_write_(pages, index_cache, **common, page=8, **also)
        assert torch.equal(got, want) and torch.equal(pages, theirs[0].data)
        assert torch.equal(index_pages, theirs[1].data if also else torch.zeros_like(index_pages))
    with pytest.raises(ValueError, match=r"norm_write: write\[1\].cache: expected"):
        ops.norm_write_(pages, None, **common, page=8, **index)


@on("prepare_queries")
def test_prepare_queries(device):
    """The bits of prepare_query() and index_query(), with each part left out once."""
    query, index = queries_of(device)
    want = winnow.prepare_query(**query), *winnow.index_query(**index)
    for got in (
        winnow.prepare_queries(query=query, index=index),
        (winnow.prepare_queries(query=query), *winnow.prepare_queries(index=index)),
        ops.prepare_queries(**query, **with_prefix("index_", index)),
    ):
        for mine, other in zip(got, want, strict=True):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


# The verbs between projections and attention, and which calls of them each kind of layer makes.
# C4A compresses latents and index keys. V4.1 writes index keys of what compress() gives.
VERBS = {
    "norm",
    "write",
    "norm_write",
    "prepare_query",
    "index_query",
    "prepare_queries",
    "compress",
}
CALLS = {
    "mla": ["norm_write", "prepare_queries"],
    "mla without indexer": ["norm_write", "prepare_query"],
    "v4-0": ["norm_write", "prepare_query"],
    "v4-4": ["norm_write", "prepare_queries", "compress", "compress"],
    "v4-128": ["norm_write", "prepare_query", "compress"],
}
V41_CALLS = [
    ["norm_write", "prepare_query"],
    ["norm_write", "prepare_queries", "compress", "write"],
    ["norm_write", "prepare_query"],
    ["norm_write", "prepare_queries", "compress", "write"],
    ["norm_write", "prepare_query"],
    ["norm_write", "prepare_queries"],
    ["norm_write", "prepare_queries"],
]


def layers_and_calls(kind, device):
    if kind == "v41":
        return zip(test_v41.layers_of(device), V41_CALLS, strict=True)
    if kind != "mla without indexer":
        return [(test_layers.layer_of(kind, device), CALLS[kind])]
    config = MlaConfig(**{**test_layers.MLA.__dict__, "indexer": False})
    without = MlaLayer(config, test_layers.mla_weights(config), device=device)
    return [(test_layers.layer_of("mla", device), CALLS["mla"]), (without, CALLS[kind])]


@on("norm_write", "prepare_queries", "compress", "absorb", "attend")
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("kind", [*CALLS, "v41"])
def test_calls_of_a_layer(kind, dtype, device, capfd, monkeypatch):
    """By WINNOW_VERBOSE, which names every call: those above, in their order, for a mixed batch."""
    layers, wanted = zip(*layers_and_calls(kind, device), strict=True)
    caches = LayerCaches(layers, dtype=dtype, page=16)
    step = caches.begin([(caches.add(), 1), (caches.add(), 5)])
    x = random(6, 64).bfloat16().to(device)
    for layer, calls in zip(layers, wanted, strict=True):
        with monkeypatch.context() as patch:
            patch.setenv("WINNOW_VERBOSE", "1")
            capfd.readouterr()
            layer(x, step)
        lines = capfd.readouterr().err.splitlines()
        named = [line.split(": ")[1] for line in lines if line.startswith("winnow: ")]
        assert "attend" in named and [verb for verb in named if verb in VERBS] == calls


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
