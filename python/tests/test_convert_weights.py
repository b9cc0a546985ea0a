"""Where the weights of converted models come from, what is refused before, and where they go."""

import copy
import io

import pytest
import torch

pytest.importorskip("transformers", minversion="5.22")

import transformers

import winnow.hf
from layer_models import FAMILIES, model_of, tokens
from winnow.torch import Checkpoint, MlaConfig, MlaLayer, V4Config, V4Layer

if not all(hasattr(transformers, f"{family}ForCausalLM") for family in FAMILIES):
    pytest.skip("this transformers lacks one of the families", allow_module_level=True)


@torch.no_grad()
def logits(model):
    return model(tokens(0, 2, 40)).logits


def test_what_is_refused_in_a_late_layer():
    """convert() looks at the weights of all layers before it replaces the first one."""
    for family, name in (("GlmMoeDsa", "o_proj"), ("DeepseekV4", "o_b_proj")):
        model = model_of(family, 0)
        projection = model.model.layers[-1].self_attn.get_submodule(name)
        good, before = projection.weight.data, dict(model.named_modules())
        for weight, error, words in (
            (good[:-1], ValueError, r"expected \[64, .*found \[63, "),
            (good.to(torch.float8_e5m2), NotImplementedError, "found torch.float8_e5m2"),
            (good.to(torch.float8_e4m3fn), KeyError, "has none of weight_scale_inv, scale beside"),
        ):
            projection.weight = torch.nn.Parameter(weight, requires_grad=False)
            with pytest.raises(error, match=f"layers.2.self_attn.{name}.weight.*{words}"):
                winnow.hf.convert(model)
        assert dict(model.named_modules()) == before and not hasattr(model.model, "winnow")
    shared = model_of("GlmMoeDsa", 0, indexer_types=["shared", "full", "full"])
    with pytest.raises(ValueError, match="its first layer has no indexer"):
        winnow.hf.convert(shared)


def test_weights_of_a_converted_model():
    """Attention is not in its state_dict(), which would lack it without a word; pickles have it."""
    plain = model_of("DeepseekV32", 0)
    weights, model = plain.state_dict(), winnow.hf.convert(copy.deepcopy(plain))
    for module in (model, model.model, model.model.layers[0]):
        with pytest.raises(NotImplementedError, match="winnow.hf: state_dict: the weights of conv"):
            module.state_dict()
    before = model.lm_head.weight.clone()
    other = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    with pytest.raises(NotImplementedError, match="winnow.hf: load_state_dict: .*q_a_proj.weight"):
        model.load_state_dict(other, strict=False)
    assert torch.equal(model.lm_head.weight, before)
    model.load_state_dict({"lm_head.weight": before + 1}, strict=False)
    model.lm_head.load_state_dict({"weight": before})
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = (torch.load(file, weights_only=False), copy.deepcopy(model))
    want = logits(model)
    for twin in twins:
        assert torch.equal(logits(twin), want)


def test_weights_without_values():
    """A model whose weights are elsewhere, as those of an offloaded one."""
    with pytest.raises(ValueError, match="its weights are on the meta device"):
        winnow.hf.convert(model_of("DeepseekV32", 0).to("meta"))


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models(family, tmp_path):
    """What transformers saved, under the names that it saved it by."""
    pytest.importorskip("safetensors")
    model = model_of(family, 0)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    v4 = family == "DeepseekV4"
    cls, sizes = (V4Layer, V4Config) if v4 else (MlaLayer, MlaConfig)
    for n, decoder in enumerate(model.model.layers):
        config = sizes.of(model.config, n)
        name = next(name for name in checkpoint if f"layers.{n}." in name and "attn." in name)
        prefix = name[: name.index("attn.") + len("attn.")]
        got = cls(config, checkpoint, prefix)
        want = cls(config, decoder.self_attn.state_dict())
        for one, two in zip(got.buffers(), want.buffers(), strict=True):
            assert torch.equal(one, two)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert torch.equal(logits(winnow.hf.convert(again)), logits(winnow.hf.convert(model)))
