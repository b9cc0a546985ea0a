"""DeepSeek V4.1: layers that share entries, index keys and choices, against the oracle."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import layer_oracle
from conftest import on
from test_layers import close, drawn, random, window_shapes
from winnow.torch import LayerCaches, V41Config, V41Layer

# The real schedule's order, shortened: two windows, a source of ratio 2 and its reader, the source
# of ratio 1 that finds blocks, its reader, and two layers that choose inside these.
CONFIG = SimpleNamespace(
    hidden_size=64,
    num_attention_heads=4,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=48,
    sliding_window=128,
    o_groups=2,
    o_lora_rank=32,
    rms_norm_eps=1e-20,
    index_n_heads=4,
    index_head_dim=128,
    index_topk=24,
    compress_ratios=[0, 2, 2, 1, 1, 1, 1],
    kv_source_layer_ids=[1, 3],
    index_source_layer_ids=[1, 3, 5, 6],
    candidate_source_layer_id=3,
    candidate_topk_blocks=6,
    candidate_block_size=8,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
)
COUNT = len(CONFIG.compress_ratios)


def weights_of(c: V41Config, prefix: str) -> dict:
    d = c.hidden
    shapes = window_shapes(c)
    if c.makes_entries:
        shapes |= {"compressor.wkv.weight": (512, d), "compressor.norm.weight": (512,)}
        if c.ratio > 1:
            shapes["compressor.wgate.weight"] = (512, d)
        shapes |= {"indexer.wk.weight": (128, 512), "indexer.k_norm.weight": (128,)}
    if c.chooses:
        shapes["indexer.wq_b.weight"] = (128 * c.index_heads, c.q_lora)
        shapes["indexer.weights_proj.weight"] = (c.index_heads, d)
    tensors = drawn(shapes, prefix)
    # Heads have no norm: smaller queries, so that a softmax does not pick one key alone.
    tensors[prefix + "wq_b.weight"] = tensors[prefix + "wq_b.weight"] * 0.3
    return tensors


def configs():
    return [V41Config.of(CONFIG, n) for n in range(COUNT)]


def layers_of(device="cpu", **changes):
    made = []
    for n, c in enumerate(configs()):
        c = dataclasses.replace(c, **changes)
        prefix = f"layers.{n}.attn."
        made.append(V41Layer(c, weights_of(c, prefix), prefix, device))
    return made


def oracle(x):
    """What every layer gives for x, each with the same input."""
    shared, out = {}, []
    for n, c in enumerate(configs()):
        prefix = f"layers.{n}.attn."
        out.append(layer_oracle.V41(c, weights_of(c, prefix), prefix, shared)(x))
    return out


def run(caches, layers, x, parts, accepted=None):
    step = caches.begin([(request, b - a) for request, a, b in parts])
    rows = torch.cat([x[request][a:b] for request, a, b in parts])
    out = [layer(rows, step) for layer in layers]
    caches.commit(step, accepted)
    return out


def test_modes_follow_the_configuration():
    makers = [c.makes_entries for c in configs()]
    assert makers == [False, True, False, True, False, False, False]
    assert [c.chooses for c in configs()] == [False, True, False, True, False, True, True]
    assert [c.finds_blocks for c in configs()].index(True) == 3
    assert [c.within_blocks for c in configs()] == [False] * 5 + [True, True]
    caches = LayerCaches(layers_of(), dtype="bf16", page=16)
    assert len(caches._states) == 1  # of ratio 2 alone
    wrong = SimpleNamespace(**{**CONFIG.__dict__, "compress_ratios": [4] * COUNT})
    with pytest.raises(
        NotImplementedError, match="expected compress_ratios of 0, 1 and 2, found 4"
    ):
        V41Config.of(wrong, 0)


@on("attend", "compress", "write", "score", "select")
def test_against_the_oracle(device):
    """Prefill in odd chunks, decodes and rejected drafts, bf16 caches, two requests at once.

    300 tokens: 38 blocks of ratio 1, of which six are candidates; 24 entries are chosen.
    """
    layers = layers_of(device)
    caches = LayerCaches(layers, dtype="bf16", page=16)
    requests = [caches.add(), caches.add()]
    x = [random(300, 64, seed=s).bfloat16() for s in (1, 2)]
    rows = [t.to(device) for t in x]
    got = [[torch.zeros(300, 64) for _ in layers] for _ in requests]

    def step(*parts, accepted=None):
        out = run(caches, layers, rows, parts, accepted)
        at = 0
        for request, a, b in parts:
            kept = b if accepted is None else a + accepted.get(request, b - a)
            for n, y in enumerate(out):
                got[request][n][a:kept] = y[at : at + kept - a].float().cpu()
            at += b - a

    step((0, 0, 131))
    step((0, 131, 132), (1, 0, 290))
    step((1, 290, 291), (0, 132, 251))
    right = rows[0]
    rows[0] = right.clone()
    rows[0][252:255] = 3.0
    step((0, 251, 255), (1, 291, 292), accepted={0: 1})
    rows[0] = right
    step((0, 252, 299), (1, 292, 300))
    step((0, 299, 300))
    for request in requests:
        for n, want in enumerate(oracle(x[request])):
            error = (got[request][n] - want).abs().amax(1) / want.abs().max()
            # Where two logits of the indexer tie within a rounding, another entry may be chosen.
            assert (error < 2.0**-6).float().mean() > 0.97, (
                f"layer {n}: {error.sort().values[-12:]}"
            )
            close(got[request][n], want)


def test_fp8_caches_follow():
    layers = layers_of()
    caches = LayerCaches(layers, dtype="fp8", page=16)
    request = caches.add()
    x = random(200, 64, seed=4).bfloat16()
    out = run(caches, layers, [x], [(request, 0, 200)])
    for n, (got, want) in enumerate(zip(out, oracle(x), strict=True)):
        error = (got.float() - want).norm() / want.norm()
        # Of the records' e4m3 codes, and of entries that are chosen by other logits.
        assert 1e-3 < error < 0.2, f"layer {n}: {error:.3g}"


def test_sources_are_missed():
    made = layers_of()
    for n, words in ((2, "needs one with them before"), (6, "needs one with them before")):
        caches = LayerCaches([made[n]], page=16)
        step = caches.begin([(caches.add(), 3)])
        with pytest.raises(ValueError, match=words):
            made[n](random(3, 64), step)
    made = layers_of()
    pair = [made[1], made[5]]
    caches = LayerCaches(pair, page=16)
    step = caches.begin([(caches.add(), 3)])
    pair[0](random(3, 64), step)
    with pytest.raises(ValueError, match="needs their source"):
        pair[1](random(3, 64), step)


def test_reused_memory():
    """Only sources keep entries: seven layers, two caches of entries and two of index keys."""
    caches = LayerCaches(layers_of(), dtype="bf16", page=16)
    formats = [f for pages in caches.pages.values() for f in pages.formats]
    assert formats.count("index_keys_bf16") == 2
    assert formats.count("v4_bf16") == COUNT + 2
