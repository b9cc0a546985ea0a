"""Where a layer's weights come from: checkpoints, e4m3 with block scales, and what is refused."""

import dataclasses
import json

import pytest
import torch

from test_layers import MLA, V4, mla_weights, v4_config, v4_weights
from winnow.torch import Checkpoint, MlaLayer, V4Layer


def quantised(tensors, scale_name, block=128):
    """The matrices of a checkpoint in e4m3 with scales of blocks, and what they stand for."""
    stored, meant = dict(tensors), dict(tensors)
    for name, w in tensors.items():
        skip = ("compressor", "weights_proj", "norm")
        if not name.endswith(".weight") or w.dim() != 2 or any(s in name for s in skip):
            continue
        blocks = [-(-n // block) for n in w.shape]
        power = torch.randint(-3, 3, blocks, generator=torch.Generator().manual_seed(len(name)))
        scale = torch.exp2(power.float())
        full = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        full = full[: w.shape[0], : w.shape[1]]
        small = (w.float() / full).to(torch.float8_e4m3fn)
        stored[name] = small
        scale_of = name.removesuffix("weight") + scale_name
        stored[scale_of] = scale if scale_name != "scale" else scale.to(torch.float8_e8m0fnu)
        meant[name] = (small.float() * full).bfloat16()
    return stored, meant


@pytest.mark.parametrize("kind", ["mla", "v4-4"])
def test_fp8_weights(kind):
    config = MLA if kind == "mla" else v4_config(4)
    make, cls = (mla_weights, MlaLayer) if kind == "mla" else (v4_weights, V4Layer)
    tensors = make(config, "layers.5.attn.")
    stored, meant = quantised(tensors, "weight_scale_inv" if kind == "mla" else "scale")
    assert any(t.dtype == torch.float8_e4m3fn for t in stored.values())
    one, two = cls(config, stored, "layers.5.attn."), cls(config, meant, "layers.5.attn.")
    for (name, got), want in zip(one.named_buffers(), two.buffers(), strict=True):
        assert torch.equal(got, want), name


def recording(get, read):
    def recorded(checkpoint, name):
        read.append(name)
        return get(checkpoint, name)

    return recorded


def test_checkpoint(tmp_path, monkeypatch):
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = mla_weights(MLA, "model.layers.0.self_attn.")
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint) == len(tensors)
    read = []
    monkeypatch.setattr(Checkpoint, "__getitem__", recording(Checkpoint.__getitem__, read))
    layer = MlaLayer(MLA, checkpoint, "model.layers.0.self_attn.")
    assert sorted(read) == sorted(tensors)  # each once
    assert torch.equal(layer.o, tensors["model.layers.0.self_attn.o_proj.weight"])
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        Checkpoint(tmp_path / "nothing")


def test_damaged_checkpoints(tmp_path):
    """The error names the file."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, one)
    save_file({"a": torch.zeros(3)}, two)
    with pytest.raises(ValueError, match="a is in one.safetensors and in two.safetensors"):
        Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": one.name, "b": two.name}}))
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint["a"], torch.ones(3)) and "b" in checkpoint
    with pytest.raises(KeyError, match="b is not in .*two.safetensors, where the index has it"):
        checkpoint["b"]
    for text in ("{", "{}", "[]"):
        index.write_text(text)
        with pytest.raises(ValueError, match="index.json: expected JSON with a weight_map"):
            Checkpoint(tmp_path)
    for files in ([one.name], {"a": 3}, "a"):
        index.write_text(json.dumps({"weight_map": files}))
        with pytest.raises(ValueError, match="index.json: weight_map: expected a file's name"):
            Checkpoint(tmp_path)
    index.unlink()
    two.write_bytes(two.read_bytes()[:-4])
    with pytest.raises(ValueError, match="^checkpoint: .*two.safetensors: "):
        Checkpoint(tmp_path)


def test_weights_that_do_not_fit():
    tensors = mla_weights(MLA, "p.")
    for name, change, error, words in (
        ("p.q_b_proj.weight", None, KeyError, "p.q_b_proj.weight is missing"),
        ("p.q_a_layernorm.weight", None, KeyError, "p.q_a_layernorm.weight is missing"),
        ("p.o_proj.weight", torch.zeros(3, 4), ValueError, r"expected \[64, 512\], found \[3, 4\]"),
        ("p.o_proj.bias", torch.zeros(64), NotImplementedError, "p.o_proj.bias: expected none"),
        (
            "p.o_proj.weight",
            torch.zeros(64, 512).to(torch.float8_e4m3fn),
            KeyError,
            "has none of weight_scale_inv, scale beside it",
        ),
    ):
        damaged = {n: t for n, t in tensors.items() if n != name}
        if change is not None:
            damaged[name] = change
        with pytest.raises(error, match=words):
            MlaLayer(MLA, damaged, "p.")


def test_weights_of_other_kinds():
    """Codes of another quantisation are not taken for values."""
    good = mla_weights(MLA)
    for dtype in (torch.int8, torch.float8_e5m2):
        tensors = {**good, "o_proj.weight": good["o_proj.weight"].to(dtype)}
        with pytest.raises(NotImplementedError, match=f"o_proj.weight: expected bf16.*{dtype}"):
            MlaLayer(MLA, tensors)
    codes = good["o_proj.weight"].to(torch.float8_e4m3fn)
    for scale, words in (
        (torch.ones(()), r"found \[\]"),
        (torch.ones(4), r"found \[4\]"),
        (torch.ones(1, 3), r"found \[1, 3\]"),
        (torch.ones(2, 4), r"found \[2, 4\]"),  # 32 rows and 128 columns are no block
    ):
        tensors = {**good, "o_proj.weight": codes, "o_proj.weight_scale_inv": scale}
        expected = r"\[ceil\(64 / 128\), ceil\(512 / 128\)\] blocks"
        with pytest.raises(ValueError, match=f"weights: scale: expected {expected}, {words}"):
            MlaLayer(MLA, tensors)
    packed = {**good, "o_proj.weight": codes, "o_proj.scale": torch.ones(1, 4).int()}
    with pytest.raises(NotImplementedError, match="weights: scale: expected floats or ue8m0"):
        MlaLayer(MLA, packed)
    bare = {**good, "o_proj.weight_scale_inv": torch.ones(1, 4)}
    with pytest.raises(ValueError, match="expected e4m3, since o_proj.weight_scale_inv is beside"):
        MlaLayer(MLA, bare)


def test_scales_of_bytes():
    """ue8m0 scales in files whose writer had no type for them."""
    stored, _ = quantised(mla_weights(MLA), "scale")
    as_bytes = {
        name: t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t
        for name, t in stored.items()
    }
    assert any(t.dtype == torch.uint8 for t in as_bytes.values())
    one, two = MlaLayer(MLA, as_bytes), MlaLayer(MLA, stored)
    for got, want in zip(one.buffers(), two.buffers(), strict=True):
        assert torch.equal(got, want)


def test_vectors_that_do_not_fit():
    """Norms, sinks and biases are checked by name when they are loaded."""
    good = v4_weights(v4_config(4))
    for name, vector, error, words in (
        ("attn_sink", torch.ones(3), ValueError, r"expected \[4\], found \[3\]"),
        (
            "compressor.ape",
            torch.ones(8, 512),
            ValueError,
            r"expected \[4, 1024\], found \[8, 512\]",
        ),
        ("kv_norm.weight", torch.ones(512).char(), NotImplementedError, "found torch.int8"),
        ("q_norm.weight", torch.ones(48, device="meta"), ValueError, "it is on the meta device"),
        ("q_norm.weight", [1.0] * 48, TypeError, "expected a torch.Tensor, found list"),
    ):
        with pytest.raises(error, match=f"^weights: {name}: .*{words}"):
            V4Layer(v4_config(4), {**good, name: vector})


def test_sizes_that_no_layer_has():
    for change, words in (
        ({"topk": 0}, "topk: expected 1 or more, found 0"),
        ({"heads": 129}, "heads: expected 1 to 128, found 129"),
        ({"index_heads": 0}, "index_heads: expected 1 to 128, found 0"),
    ):
        with pytest.raises(ValueError, match=f"^layers: config: {words}"):
            dataclasses.replace(MLA, **change)
    for change, words in (
        ({"window": 0}, "window: expected 1 or more, found 0"),
        ({"groups": 3}, "groups: expected a divisor of 4 heads, found 3"),
        ({"groups": 0}, "groups: expected 1 or more, found 0"),
        ({"ratio": 2}, "ratio: expected 0, 4 or 128, found 2"),
    ):
        with pytest.raises(ValueError, match=f"^layers: config: {words}"):
            dataclasses.replace(V4, **change)
    for size in (4.0, "4", None):
        found = type(size).__name__
        for config in (MLA, V4):
            with pytest.raises(TypeError, match=f"config: heads: expected an int, found {found}$"):
                dataclasses.replace(config, heads=size)
