"""How an operator of torch.ops.winnow is defined: schema, kernels for CPU and CUDA, fake kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow import _winnow

ops = torch.ops.winnow
library = torch.library.Library("winnow", "DEF")


def cache_of(data: Tensor | None, fmt: str, page: int | None) -> _winnow.Cache | None:
    # A bf16 tensor of two dimensions is a contiguous KV unless a page is named.
    return None if data is None else _winnow.Cache(data, fmt, page)


def _one_device(name: str, arguments: dict) -> None:
    """One tensor on "meta" sends a call here: the others' devices are results' devices too."""
    first = None
    for argument, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        first = value.device if first is None else first
        if value.device != first:
            raise ValueError(
                f"{name}: {argument}: expected a tensor on {first}, as the ones before it, "
                f"found one on {value.device}"
            )


def _refuse_gradients(name: str, arguments: dict) -> None:
    """As the call itself would: a graph that is traced with gradients runs without them later."""
    if not torch.is_grad_enabled():
        return
    for argument, value in arguments.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise NotImplementedError(
                f"{name}: {argument}: expected a tensor without requires_grad, or a call under "
                "torch.no_grad(), as winnow computes no gradients; found one that requires them"
            )


def operator(schema: str):
    """Registers the function below for CPU and CUDA; its attribute `fake` registers shapes."""
    name = schema[: schema.index("(")]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    parameters = [a.name for a in getattr(ops, name).default._schema.arguments]

    def fake(shapes):
        def checked(*args, **kwargs):
            arguments = dict(zip(parameters, args, strict=False)) | kwargs
            _one_device(name, arguments)
            _refuse_gradients(name, arguments)
            return shapes(*args, **kwargs)

        return torch.library.register_fake(f"winnow::{name}", checked, lib=library)

    def register(function):
        for key in ("CPU", "CUDA"):
            library.impl(name, function, key)
        function.fake = fake
        return function

    return register


def new_bf16(like: Tensor, *shape) -> Tensor:
    return like.new_empty(shape, dtype=torch.bfloat16)


def new_f32(like: Tensor, *shape) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def new_i32(like: Tensor, *shape) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)
