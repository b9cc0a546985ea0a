"""Where a layer's weights come from: checkpoints, e4m3 with block scales, and what is refused."""

import pytest
import torch

from test_layers import MLA, mla_weights, v4_config, v4_weights
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


def test_checkpoint(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = mla_weights(MLA, "model.layers.0.self_attn.")
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint) == len(tensors)
    layer = MlaLayer(MLA, checkpoint, "model.layers.0.self_attn.")
    assert torch.equal(layer.o, tensors["model.layers.0.self_attn.o_proj.weight"])
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        Checkpoint(tmp_path / "nothing")


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
        (torch.ones(()), r"expected \[row blocks, column blocks\], found \[\]"),
        (torch.ones(1, 3), r"expected ceil\(512 / 128\) blocks, found 3"),
    ):
        tensors = {**good, "o_proj.weight": codes, "o_proj.weight_scale_inv": scale}
        with pytest.raises(ValueError, match=f"weights: scale: {words}"):
            MlaLayer(MLA, tensors)
