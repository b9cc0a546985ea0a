"""Damage: what the sweep of hostile calls puts in the place of good arguments."""

from __future__ import annotations

import random

import numpy as np
import torch

import winnow


class OnlyDlpack:
    """An array of a library that winnow does not know: DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class Mine(Exception):
    """What an argument's own code raises. It may pass."""


class Raises:
    """An object all of whose methods raise."""

    def _raise(self, *args, **kwargs):
        raise Mine()

    __bool__ = __index__ = __float__ = __iter__ = __len__ = __str__ = __repr__ = _raise
    __dlpack__ = __dlpack_device__ = __array__ = _raise


DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
INTS = [
    0, 1, -1, 2, 3, 7, 64, 127, 2**15, 2**20, 2**31 - 1, -(2**31), 2**31, 2**32 + 1, 2**40, 2**62,
    2**63 - 1, -(2**63), 2**63, 2**64, 10**30,
]  # fmt: skip
FLOATS = [0.0, -1.0, 1e-40, 1e38, 1e300, float("nan"), float("inf"), -float("inf")]
TEXTS = [
    "",
    "reference",
    "simd",
    "v32_fp8",
    "v4_bf16",
    "index_keys",
    "auto",
    "x" * 5000,
    "\ud800",
    "\0",
]
OBJECTS = [
    None,
    True,
    False,
    3,
    -1,
    2.5,
    "text",
    b"bytes",
    [],
    [1, 2],
    (),
    {},
    object,
    Raises(),
    1j,
]


def read_only(x: torch.Tensor):
    array = x.numpy() if x.dtype not in (torch.bfloat16, torch.float8_e4m3fn) else None
    array = x.view(torch.uint8).numpy() if array is None else array
    array.flags.writeable = False
    return array


def strided(x: torch.Tensor, r: random.Random):
    """The values behind other strides, some of which no kernel serves."""
    kind = r.randrange(6)
    if kind == 0:
        return x[..., :: r.choice([2, 3])]
    if kind == 1 and x.dim() > 1:
        return x.transpose(r.randrange(x.dim()), r.randrange(x.dim()))
    if kind == 2:
        return x[:1].expand(r.choice([1, 2, x.shape[0]]), *x.shape[1:]) if x.shape[0] else x
    if kind == 3:
        return np.flip(read_only(x), r.randrange(x.dim()))
    if kind == 4 and x.numel() > 1:  # begins in the middle of an element's alignment
        flat = x.flatten()
        return flat[1:].view(torch.uint8)[1:].clone()
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + r.choice([1, 3, 8]), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def reshaped(x: torch.Tensor, r: random.Random):
    kind = r.randrange(8)
    if kind == 0:
        return x[: r.randrange(x.shape[0] + 1)]
    if kind == 1:
        return torch.cat([x, x[:1]])
    if kind == 2:
        return x[..., : r.randrange(x.shape[-1] + 1)]
    if kind == 3:
        return torch.cat([x, x[..., :1]], -1)
    if kind == 4:
        return x.flatten()
    if kind == 5:
        return x.unsqueeze(r.randrange(x.dim() + 1))
    if kind == 6:
        return x[(0,) * x.dim()] if x.numel() else x
    return x[None, None, None, None]


def other_values(x: torch.Tensor, r: random.Random):
    """The same array with other contents, in place: hostile ids, NaN, any bytes."""
    if x.dtype in (torch.int32, torch.int64):
        largest = torch.iinfo(x.dtype).max
        values = [0, -1, 1, 100, largest, -largest - 1, largest - 63, 1 << 30]
        spots = torch.tensor(r.choices(values, k=x.numel()), dtype=x.dtype)
        keep = torch.tensor(r.choices([True, False], k=x.numel()))
        x.copy_(torch.where(keep.view(x.shape), x, spots.view(x.shape)))
    elif x.dtype == torch.uint8:
        x.random_(0, 256)
    elif x.dtype != torch.float8_e4m3fn:
        x.flatten()[:: r.choice([1, 3, 7])] = r.choice(FLOATS)
    return x


def without_memory(x: torch.Tensor):
    """A view behind the start of a storage that was given back."""
    freed = x.clone()
    view = freed[x.shape[0] // 2 :]
    freed.untyped_storage().resize_(0)
    return view


def damaged_tensor(x: torch.Tensor, r: random.Random):
    kind = r.randrange(15)
    if kind == 0:
        return x.to(r.choice(DTYPES)) if x.dtype != torch.bool else None
    if kind in (1, 2):
        return strided(x, r)
    if kind in (3, 4):
        return reshaped(x, r)
    if kind in (5, 6, 7):
        return other_values(x, r)
    if kind == 8:
        return x.to("meta")
    if kind == 9:
        return read_only(x)
    if kind == 10:
        return OnlyDlpack(x)
    if kind == 11:
        return x.to(torch.float32).requires_grad_()
    if kind == 12 and x.dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        return x.to_sparse()
    if kind == 13:
        return without_memory(x)
    return r.choice(OBJECTS)


def damaged_cache(cache: winnow.Cache, r: random.Random):
    data, page = cache.data, cache.page
    makers = [
        lambda: winnow.Cache.__new__(winnow.Cache),
        lambda: data,
        lambda: winnow.Cache(data, r.choice(winnow.cache_formats()), r.choice([None, 1, page])),
        lambda: winnow.Cache(data[: r.randrange(data.shape[0] + 1)], cache.format, page),
        lambda: winnow.Cache(data, cache.format, r.choice([1, 2, page, 2**31 - 1, 2**31, -1, 0])),
        lambda: winnow.Cache(other_values(data, r), cache.format, page),
        lambda: winnow.Cache(damaged_tensor(data, r), cache.format, page),
        lambda: r.choice(OBJECTS),
    ]
    return r.choice(makers)()


def damaged_plan(plan: winnow.Plan, r: random.Random):
    makers = [
        lambda: winnow.Plan.__new__(winnow.Plan),
        lambda: winnow.Plan(heads=r.choice([1, 2, 128]), page=8, pages=3),
        lambda: winnow.Plan(model="v4", heads=2, page=8, pages=3, max_tokens=4),
        lambda: r.choice(OBJECTS),
    ]
    return r.choice(makers)()


def damaged(value, r: random.Random):
    """One value in place of another: of its kind, or of any."""
    if r.random() < 0.08:
        return r.choice(OBJECTS)
    if isinstance(value, torch.Tensor):
        return damaged_tensor(value, r)
    if isinstance(value, winnow.Cache):
        return damaged_cache(value, r)
    if isinstance(value, winnow.Plan):
        return damaged_plan(value, r)
    if isinstance(value, bool):
        return r.choice([not value, None, 2, "yes", np.zeros(2), Raises()])
    if isinstance(value, float):
        return r.choice([*FLOATS, 2, "1", None, 1j, torch.ones(1), Raises()])
    if isinstance(value, str):
        return r.choice([*TEXTS, None, 3])
    if isinstance(value, list):
        places = r.choices(range(-2, 12), k=r.randrange(5))
        return r.choice([places, [*value, r.choice(INTS)], tuple(value), [1.5], ["1"], iter(value)])
    return r.choice([*INTS, True, 1.5, "3", np.int64(2), np.float32(1), Raises()])
