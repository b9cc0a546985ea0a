"""Whole layers against transformers' own modules in fp32: every kind, bf16 caches, any chunks.

The models' weights are bf16 values and so is each layer's input, so that what differs is what
docs/layers.md rounds: about ten roundings of 2^-8. Where two of the indexer's logits tie within
that, another entry may be chosen.
"""

import contextlib

import pytest
import torch

pytest.importorskip("transformers", minversion="5.22")

from layer_models import FAMILIES, model_of, tokens
from winnow.torch import LayerCaches, MlaConfig, MlaLayer, V4Config, V4Layer

LENGTH = {"DeepseekV32": 180, "GlmMoeDsa": 180, "DeepseekV4": 300}
ROUNDING = 2.0**-8


def model_in_fp32(family):
    """Weights as bf16 holds them, computed with in fp32."""
    model = model_of(family, 3, torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@contextlib.contextmanager
def recorded_scores(found, count):
    """The indexers' scores [tokens, keys], which they give to topk() and to nobody else."""
    before = torch.Tensor.topk

    def topk(scores, *args, **kwargs):
        if scores.dim() == 3 and scores.shape[:2] == (1, count):
            found[-1]["scores"] = scores[0].clone()
        return before(scores, *args, **kwargs)

    torch.Tensor.topk = topk
    try:
        yield
    finally:
        torch.Tensor.topk = before


def dumped(model, ids):
    """Input, output and the indexer's scores of every attention module of transformers."""
    found = []

    def before(module, args, kwargs):
        x = kwargs.get("hidden_states", args[0] if args else None)
        kwargs["hidden_states"] = x.bfloat16().to(x.dtype)
        found.append({"x": kwargs["hidden_states"][0]})
        return (), kwargs

    def after(module, args, kwargs, result):
        found[-1]["y"] = (result[0] if isinstance(result, tuple) else result)[0].float()

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
        layer.self_attn.register_forward_hook(after, with_kwargs=True)
    with torch.no_grad(), recorded_scores(found, ids.shape[1]):
        model(ids, use_cache=False)
    return found


class Choices:
    """A layer's choose() that keeps what it gives."""

    def __init__(self, layer, tokens, topk):
        self.choose, self.ids, self.at = layer.choose, torch.full((tokens, topk), -1), 0

    def __call__(self, *args, **kwargs):
        ids = self.choose(*args, **kwargs)
        self.ids[self.at : self.at + len(ids), : ids.shape[1]] = ids
        self.at += len(ids)
        return ids


def layers_of(model, family):
    layers = []
    for n, decoder in enumerate(model.model.layers):
        weights = decoder.self_attn.state_dict()
        if family == "DeepseekV4":
            layers.append(V4Layer(V4Config.of(model.config, n), weights))
        else:
            config = MlaConfig.of(model.config, n)
            eps = decoder.self_attn.q_a_layernorm.variance_epsilon
            layers.append(MlaLayer(MlaConfig(**{**config.__dict__, "eps": eps}), weights))
    return layers


def same_choice(ids, scores, topk, ratio):
    """[tokens] bool: rows whose ids are transformers'; the others must tie within the roundings."""
    same = torch.ones(len(ids), dtype=torch.bool)
    for t, row in enumerate(ids):
        seen = (t + 1) // ratio
        got = set(row[row >= 0].tolist())
        assert len(got) == min(seen, topk) and all(i < seen for i in got)
        if seen <= topk:
            continue
        visible = scores[t, :seen]
        best = visible.topk(topk)
        want = set(best.indices.tolist())
        # Queries carry four roundings, keys three and weights one, of logits of this size.
        bound = 2 * 8 * ROUNDING * visible.square().mean().sqrt()
        for i in got - want:
            assert visible[i] >= best.values[-1] - bound, f"token {t}: {i} is not among the best"
        same[t] = got == want
    return same


@pytest.mark.parametrize("chunk", [37, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_transformers(family, chunk):
    model, ids = model_in_fp32(family), tokens(9, 1, LENGTH[family])
    want = dumped(model, ids)
    layers = layers_of(model, family)
    caches = LayerCaches(layers, dtype="bf16", page=16)
    request = caches.add()
    choices = {}
    for n, layer in enumerate(layers):
        if "scores" in want[n]:
            choices[n] = layer.choose = Choices(layer, ids.shape[1], layer.config.topk)
    got = [[] for _ in layers]
    for at in range(0, ids.shape[1], chunk):
        rows = slice(at, min(at + chunk, ids.shape[1]))
        step = caches.begin([(request, rows.stop - rows.start)])
        for n, layer in enumerate(layers):
            got[n].append(layer(want[n]["x"][rows].bfloat16(), step))
        caches.commit(step)
    same = torch.ones(ids.shape[1], dtype=torch.bool)  # GLM's layers without an indexer: the last
    for n, parts in enumerate(got):
        ratio = max(1, getattr(layers[n].config, "ratio", 1))
        if n in choices:
            topk = layers[n].config.topk
            same = same_choice(choices[n].ids, want[n]["scores"], topk, ratio)
            assert same.float().mean() > 0.5, f"layer {n}: {same.float().mean():.2f} rows alike"
        elif family == "DeepseekV4":
            same = torch.ones_like(same)
        y, expected = torch.cat(parts).float(), want[n]["y"]
        error = (y - expected).norm(dim=1) / expected.norm(dim=1)
        print(f"\n{family} {n}: {error.median():.4f}, at most {error[same].max():.4f} of y")
        assert error.median() < 4 * ROUNDING, f"layer {n}: {error.median():.3g}"
        assert error[same].max() < 12 * ROUNDING, f"layer {n}: {error[same].max():.3g}"


@pytest.mark.parametrize("family", FAMILIES)
def test_as_close_as_transformers_in_bf16(family):
    """transformers in bf16 rounds after every operation: the layers lie no further from fp32, but
    for a tenth, since GEMMs sum in another order."""
    ids = tokens(9, 1, LENGTH[family])
    exact = dumped(model_in_fp32(family), ids)
    rounding = model_in_fp32(family).bfloat16()
    layers = layers_of(rounding, family)

    def given(x):
        """The input that the layer had in fp32."""
        return lambda _, args, kwargs: (args, kwargs | {"hidden_states": x.bfloat16()[None]})

    for decoder, of in zip(rounding.model.layers, exact, strict=True):
        decoder.self_attn.register_forward_pre_hook(given(of["x"]), with_kwargs=True)
    eager = dumped(rounding, ids)
    caches = LayerCaches(layers, dtype="bf16", page=16)
    step = caches.begin([(caches.add(), ids.shape[1])])
    for n, layer in enumerate(layers):
        ours = layer(exact[n]["x"].bfloat16(), step).float()
        size = exact[n]["y"].norm(dim=1)
        moved = [((y - exact[n]["y"]).norm(dim=1) / size).median() for y in (ours, eager[n]["y"])]
        print(f"\n{family} {n}: ours {moved[0]:.4f}, transformers in bf16 {moved[1]:.4f}")
        assert moved[0] < 1.1 * moved[1], f"layer {n}: {moved}"
