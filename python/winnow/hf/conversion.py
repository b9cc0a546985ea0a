"""convert(): winnow's layers in the place of a transformers model's attention modules."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from winnow import _winnow
from winnow.hf.paged_cache import PagedCache, Pass
from winnow.torch import LayerCaches, MlaConfig, MlaLayer, V4Config, V4Layer

# The mask that a model passes on to its attention modules, instead of making one that none reads.
_NO_MASK = {
    "deepseek_v32": {"indexed_attention": None},
    "glm_moe_dsa": {"indexed_attention": None},
    "deepseek_v4": {"sliding_attention": None},
}
_FAMILIES = ", ".join(_NO_MASK)
# What names several sequences in one row; transformers' collators give positions besides.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def convert_model(model: nn.Module, cache: str, page: int) -> nn.Module:
    if cache not in ("fp8", "bf16"):
        raise ValueError(f"winnow.hf: cache: expected fp8 or bf16, found {cache!r}")
    if not hasattr(page, "__index__"):
        raise TypeError(f"winnow.hf: page: expected an int, found {type(page).__name__}")
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in _NO_MASK:
        raise NotImplementedError(
            f"winnow.hf: model: expected one of {_FAMILIES}, found {family or type(model).__name__}"
        )
    base = getattr(model, model.base_model_prefix, model)
    if hasattr(base, "winnow"):
        raise ValueError("winnow.hf: model: it has been converted before")
    _check_before(base.layers, family, page)
    layers = []
    for decoder in base.layers:
        # The old module goes when its place is taken: one layer's weights are there twice at most.
        layers.append(_layer_of(decoder.self_attn, family))
        decoder.self_attn = Attention(layers[-1], 3 if family == "glm_moe_dsa" else 2)
    base.winnow = Converter(layers, family, cache, page)
    base.register_forward_pre_hook(base.winnow.before, with_kwargs=True)
    base.register_forward_hook(base.winnow.after, with_kwargs=True)
    for saved in (model, base):
        saved.save_pretrained = _refuse_to_save
        saved.register_load_state_dict_pre_hook(_refuse_to_load)
    if hasattr(model, "_prepare_cache_for_generation"):
        prepare = model._prepare_cache_for_generation
        model._prepare_cache_for_generation = functools.partial(_prepare_cache, model, prepare)
    return model


def converter_of(model: nn.Module) -> Converter:
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if not hasattr(base, "winnow"):
        raise ValueError("winnow.hf: model: expected one that convert() made")
    return base.winnow


def _check_before(decoders: Iterable[nn.Module], family: str, page: int) -> None:
    """What cannot be served is said before the first layer is replaced."""
    _winnow.cache_shape("v32_fp8", 1, page)
    attentions = [decoder.self_attn for decoder in decoders]
    for number, attention in enumerate(attentions):
        config = _config_of(attention, family)
        if number == 0 and not getattr(config, "indexer", True):
            raise ValueError("winnow.hf: model: its first layer has no indexer to choose for it")
    devices = {parameter.device for attention in attentions for parameter in attention.parameters()}
    if len(devices) != 1:
        raise ValueError(
            f"winnow.hf: model: expected one device, found {sorted(map(str, devices))}"
        )
    if devices == {torch.device("meta")}:
        raise ValueError("winnow.hf: model: its weights are on the meta device and have no values")
    for attention in attentions:
        # Names, shapes and dtypes of all weights: what is made there takes no memory.
        _layer_of(attention, family, "meta")


def _config_of(attention: nn.Module, family: str) -> MlaConfig | V4Config:
    if family == "deepseek_v4":
        return V4Config.of(attention.config, attention.layer_idx)
    sizes = MlaConfig.of(attention.config, attention.layer_idx)
    # GLM's latent norms have the class's default in transformers, not the configuration's epsilon.
    return dataclasses.replace(sizes, eps=attention.q_a_layernorm.variance_epsilon)


def _layer_of(attention: nn.Module, family: str, device=None) -> nn.Module:
    layer = V4Layer if family == "deepseek_v4" else MlaLayer
    device = device or next(attention.parameters()).device
    prefix = f"layers.{attention.layer_idx}.self_attn."
    weights = attention.state_dict(prefix=prefix)
    return layer(_config_of(attention, family), weights, prefix, device=device)


def _refuse_to_save(*args, **kwargs):
    raise NotImplementedError(
        "winnow.hf: save_pretrained: the weights of converted layers are not a checkpoint's; save "
        "the model before convert()"
    )


def _refuse_to_load(module, state_dict, prefix, *args) -> None:
    found = next((name for name in state_dict if ".self_attn." in name), None)
    if found is not None:
        raise NotImplementedError(
            f"winnow.hf: load_state_dict: the layer of {found} is converted; load weights before "
            "convert()"
        )


def _prepare_cache(model: nn.Module, prepare, generation_config, model_kwargs, *args, **kwargs):
    """generate()'s default cache is winnow's; what names another one is refused."""
    if generation_config.cache_implementation is not None:
        raise NotImplementedError(
            f"winnow.hf: cache_implementation: expected None, found "
            f"{generation_config.cache_implementation!r}"
        )
    if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
        model_kwargs["past_key_values"] = converter_of(model).new_cache()
        return None
    return prepare(generation_config, model_kwargs, *args, **kwargs)


class Attention(nn.Module):
    """A winnow layer under the signature of transformers' attention modules."""

    def __init__(self, layer: nn.Module, results: int):
        super().__init__()
        self.layer, self.results = layer, results

    def forward(self, hidden_states: Tensor, winnow_pass: Pass | None = None, **unused):
        if winnow_pass is None:
            raise RuntimeError("winnow.hf: a converted layer runs inside its model only")
        rows, columns, hidden = hidden_states.shape
        x = hidden_states.reshape(rows * columns, hidden)
        kept, step = winnow_pass.kept, winnow_pass.step
        if kept is None:
            out = self.layer(x, step).to(x.dtype)
        else:
            out = torch.zeros_like(x)
            if step.tokens:
                out[kept] = self.layer(x[kept], step).to(x.dtype)
        return (out.view(rows, columns, hidden), *[None] * (self.results - 1))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        raise NotImplementedError(
            "winnow.hf: state_dict: the weights of converted layers are not a checkpoint's; take "
            "it before convert()"
        )


class Converter:
    """What a converted model keeps: its layers, and how their caches are made."""

    def __init__(self, layers: list, family: str, cache: str, page: int):
        self.layers, self.family, self.cache, self.page = layers, family, cache, page

    def new_cache(self) -> PagedCache:
        caches = LayerCaches(self.layers, dtype=self.cache, page=self.page)
        return PagedCache(caches, len(self.layers), croppable=self.family != "deepseek_v4")

    def before(self, model: nn.Module, args: tuple, kwargs: dict):
        """Before the model's forward: what its layers will share."""
        arguments = inspect.signature(model.forward).bind_partial(*args).arguments | kwargs
        ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
        if (ids is None) == (embeds is None):
            return None  # the model's own error
        inputs = embeds if ids is None else ids
        if inputs.dim() != (3 if ids is None else 2):
            raise ValueError(
                f"winnow.hf: {'inputs_embeds' if ids is None else 'input_ids'}: expected [rows, "
                f"columns{', hidden' if ids is None else ''}], found {list(inputs.shape)}"
            )
        _refuse_what_is_not_served(model, arguments)
        cache = arguments.get("past_key_values")
        if cache is None:
            cache = self.new_cache()
        elif not isinstance(cache, PagedCache):
            raise TypeError(
                "winnow.hf: past_key_values: expected a cache of winnow.hf.new_cache(model), found "
                f"{type(cache).__name__}"
            )
        use_cache = arguments.get("use_cache")
        if model.config.use_cache if use_cache is None else use_cache:
            arguments["past_key_values"] = cache
        arguments["winnow_pass"] = cache.begin(
            *inputs.shape[:2], arguments.get("attention_mask"), arguments.get("position_ids")
        )
        arguments["attention_mask"] = _NO_MASK[self.family]
        return (), arguments

    def after(self, model: nn.Module, args: tuple, kwargs: dict, result):
        """After it, and not where it raised: the new tokens belong to the cache."""
        done = kwargs["winnow_pass"]
        done.cache.commit(done)


def _refuse_what_is_not_served(model: nn.Module, arguments: dict) -> None:
    if model.training:
        raise NotImplementedError("winnow.hf: training is not served: call model.eval()")
    if torch.is_grad_enabled():
        embeds = arguments.get("inputs_embeds")
        if any(p.requires_grad for p in model.parameters()) or (
            embeds is not None and embeds.requires_grad
        ):
            raise NotImplementedError(
                "winnow.hf: inference only: run under torch.no_grad(), or without requires_grad"
            )
    for name in _PACKED:
        if arguments.get(name) is not None:
            raise NotImplementedError(f"winnow.hf: {name}: packed sequences are not served")
    asked = arguments.get("output_attentions")
    if model.config.output_attentions if asked is None else asked:
        raise NotImplementedError("winnow.hf: output_attentions: the weights are never stored")
