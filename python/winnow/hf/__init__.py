"""winnow for transformers, in two ways.

``register()``: an attention implementation; load a model with ``attn_implementation="winnow"``.
Projections, indexer and caches stay transformers' own (interface.py).

``convert(model)``: every attention layer of a DeepSeek V3.2, GLM-5 or DeepSeek V4 model is replaced
by winnow's, with paged caches in fp8 or bf16 (conversion.py, docs/layers.md).
"""

from winnow.hf.interface import attention, register

__all__ = ["attention", "convert", "new_cache", "register"]


def convert(model, cache: str = "fp8", *, page: int = 64):
    """Replaces the attention layers of `model`, in place, and returns it.

    cache  "fp8" or "bf16": the records of the paged caches
    page   tokens of a page

    generate() and the model's forward then use caches of new_cache(model). Attention's weights are
    held in bf16; fp8 weights with block scales are dequantised. Inference only.
    """
    from winnow.hf.conversion import convert_model

    return convert_model(model, cache, page)


def new_cache(model):
    """Empty caches for a converted model: `past_key_values` of generate() and of the forward."""
    from winnow.hf.conversion import converter_of

    return converter_of(model).new_cache()
