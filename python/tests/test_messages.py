"""What is refused, and in whose words: errors name Python's arguments and say what to do."""

import numpy as np
import pytest
import torch

import winnow
import winnow.torch
from winnow import flash_mla

INT = torch.int32


def latent(pages=4, page=16):
    return winnow.Cache(
        torch.zeros(winnow.cache_shape("v32_fp8", pages, page), dtype=torch.uint8), "v32_fp8", page
    )


def query(tokens=1):
    return torch.zeros(tokens, 4, 576).bfloat16()


def ints(*shape):
    return torch.zeros(*shape, dtype=INT)


@pytest.mark.parametrize(
    "text, changes",
    [
        (
            r"^attend: indices: expected \[1, any\] int32, found \[2, 3\] int32$",
            {"indices": ints(2, 3)},
        ),
        ("^attend: lengths: ", {"lengths": ints(3)}),
        ("^attend: block_table: ", {"block_table": ints(3), "requests": ints(1)}),
        ("^attend: extra_cache: expected a cache", {"extra_indices": ints(1, 3)}),
        ("^attend: extra_indices: ", {"extra_cache": latent(), "extra_indices": ints(3)}),
        (
            "^attend: extra_lengths: ",
            {"extra_cache": latent(), "extra_indices": ints(1, 3), "extra_lengths": ints(4)},
        ),
        (
            "^attend: cache: .* latent KV, found index_keys",
            {"cache": winnow.Cache(torch.zeros(2, 132 * 4, dtype=torch.uint8), "index_keys", 4)},
        ),
        (
            "^attend: extra_cache: .* as cache, found v4_bf16",
            {
                "extra_cache": winnow.Cache(torch.zeros(4, 512).bfloat16(), "v4_bf16"),
                "extra_indices": ints(1, 2),
            },
        ),
    ],
)
def test_attend(text, changes):
    arguments = {"q": query(), "cache": latent(), "indices": ints(1, 3), "scale": 1.0, **changes}
    with pytest.raises(ValueError, match=text):
        winnow.attend(**arguments)


def test_pipeline():
    plan = winnow.Plan(heads=4, topk=8, index_heads=2, page=16, pages=4)
    plan.refill([0, 1], [5])
    good = {
        "plan": plan,
        "q": query(),
        "kv": torch.zeros(1, 576).bfloat16(),
        "slots": torch.zeros(1, dtype=torch.int64),
        "cache": latent(),
        "block_table": ints(1, 4),
        "index_k": torch.zeros(1, 128).bfloat16(),
        "index_slots": torch.zeros(1, dtype=torch.int64),
        "index_keys": winnow.Cache(torch.zeros(4, 16 * 132, dtype=torch.uint8), "index_keys", 16),
        "index_table": ints(1, 4),
        "index_q": torch.zeros(1, 2, 128, dtype=torch.uint8),
        "index_weights": torch.zeros(1, 2),
        "scale": 1.0,
    }
    assert winnow.pipeline(**good).shape == (1, 4, 512)
    for name in ("index_k", "index_slots", "index_table", "index_q", "index_weights"):
        with pytest.raises(ValueError, match=f"^pipeline: {name}: expected"):
            winnow.pipeline(**{**good, name: torch.zeros(3, 1)})
    with pytest.raises(ValueError, match="^pipeline: index_keys: expected a cache, found none"):
        winnow.pipeline(**{**good, "index_keys": None})


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: winnow.select(torch.zeros(2, 5), out=x), "^select: out: expected"),
        (
            lambda x: winnow.locate(ints(2, 3), ints(2), ints(1, 1), pages=1, out=x),
            "^locate: out: ",
        ),
        (lambda x: winnow.topk_mask(ints(2, 3), 8, out=x), "^topk_mask: out: expected"),
        (lambda x: winnow.window_lists(ints(2), out=x), "^window_lists: out: expected"),
        (
            lambda x: winnow.compressed_slots(ints(2), ints(2), ints(1, 1), pages=1, out=x),
            "_slots: out: ",
        ),
        (
            lambda x: winnow.locate(ints(2, 3), ints(2), ints(1, 1), pages=1, world=0),
            "^locate: world: ",
        ),
    ],
)
def test_outputs(call, text):
    with pytest.raises(ValueError, match=text):
        call(torch.zeros(3))


def test_int64_indices():
    """As torch.topk and NumPy give them."""
    hint = r"int64; convert it: \.int\(\) in PyTorch, \.astype\(\"int32\"\) in NumPy"
    indices = torch.topk(torch.randn(1, 4), 3).indices
    with pytest.raises(ValueError, match="attend: indices: expected .* found .*" + hint):
        winnow.attend(query(), latent(), indices, scale=1.0)
    plan = winnow.Plan(heads=4, pages=4, max_tokens=4)
    for starts in (torch.tensor([0, 1]), np.array([0, 1])):
        with pytest.raises(ValueError, match="refill: query_starts: expected .*" + hint):
            plan.refill(starts, [5])
    with pytest.raises(TypeError, match="seq_lens: expected an int32 array or a sequence of ints"):
        plan.refill([0, 1], 5)


def test_pages_must_be_given():
    """Without them every slot of a block table would be outside the cache: -1, silently."""
    ids, row, table = ints(1, 3), ints(1), ints(1, 2)
    for call in (
        lambda **p: winnow.locate(ids, row, table, page=64, **p),
        lambda **p: winnow.window_lists(row, row, table, window=8, **p),
        lambda **p: winnow.compressed_slots(row, row, table, **p),
        lambda **p: winnow.c128a_lists(row, row, table, width=4, decode_tokens=1, **p),
        lambda **p: torch.ops.winnow.window_lists(row, row, table, **p),
    ):
        call(pages=2)
        for missing in ({}, {"pages": 0}):
            with pytest.raises(ValueError, match="pages: expected"):
                call(**missing)
    assert winnow.window_lists(row, window=2)[0].tolist() == [[0, -1]]
    with pytest.raises(TypeError, match=r"Plan\(\) misses the argument 'pages'"):
        winnow.Plan(heads=4)


def test_scale_must_be_given():
    """The models' scales do not follow from any shape."""
    q, cache, indices = query(), latent(), ints(1, 3)
    with pytest.raises(TypeError, match=r"attend\(\) misses the argument 'scale'"):
        winnow.attend(q, cache, indices)
    with pytest.raises(TypeError, match="attend: scale: expected a number, found None"):
        winnow.attend(q, cache, indices, scale=None)
    with pytest.raises(TypeError, match=r"pipeline\(\) misses the argument 'scale'"):
        winnow.pipeline(None, q, q, q, cache, indices)
    with pytest.raises(TypeError, match=r"attend_mha\(\) misses the argument 'scale'"):
        winnow.attend_mha(q, q, q)
    with pytest.raises(RuntimeError, match="missing value for argument 'scale'"):
        torch.ops.winnow.attend(q, cache.data, indices, "v32_fp8", 16)
    with pytest.raises(RuntimeError, match="missing value for argument 'scale'"):
        torch.ops.winnow.attend_mha(q, q, q)
    # FlashMLA has a default, so winnow.flash_mla has it too.
    q = torch.randn(1, 1, 4, 576).bfloat16()
    arguments = q, torch.ones(1, 16, 1, 656, dtype=torch.uint8), None, None, 512
    keywords = {"is_fp8_kvcache": True, "indices": ints(1, 1, 3)}
    want = flash_mla.flash_mla_with_kvcache(*arguments, softmax_scale=576**-0.5, **keywords)
    got = flash_mla.flash_mla_with_kvcache(*arguments, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "data, fmt",
    [
        (np.zeros((4, 16 * 656), np.uint8)[::-1], "v32_fp8"),
        (np.zeros((4, 16, 656), np.uint8)[::-1], "v32_fp8"),
        (np.zeros((4, 576), np.uint16)[::-1], "v32_bf16"),
        (torch.zeros(10**6, dtype=torch.uint8).as_strided((4, 16 * 656), (656, 1)), "v32_fp8"),
        (torch.zeros(10**6).bfloat16().as_strided((4, 576), (575, 1)), "v32_bf16"),
    ],
)
def test_pages_that_overlap(data, fmt):
    """Strides that every use of the cache would refuse are refused by the cache."""
    page = None if data.ndim == 3 or fmt == "v32_bf16" else 16
    with pytest.raises(
        ValueError, match="Cache: data: expected pages at least .* found stride -?[0-9]+$"
    ):
        winnow.Cache(data, fmt, page)


class Described:
    """An array of an unknown library that says what it is told to say."""

    def __init__(self, dlpack, device=(1, 0)):
        self.dlpack, self.device = dlpack, device

    def __dlpack__(self, **kwargs):
        return self.dlpack()

    def __dlpack_device__(self):
        return self.device


def raised(error):
    raise error


def test_what_dlpack_raises_is_the_cause():
    for cause in (KeyError("mine"), BufferError("none left"), TypeError("no")):
        with pytest.raises(
            TypeError, match="select: logits: .* found Described, which raised"
        ) as caught:
            winnow.select(Described(lambda cause=cause: raised(cause)), 3)
        assert caught.value.__cause__ is cause
    for through in (MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(through)):
            winnow.select(Described(lambda through=through: raised(through)), 3)
    with pytest.raises(TypeError, match="raised KeyError: 'index'"):
        winnow.Cache(Described(lambda: raised(KeyError("index"))), "v32_fp8")
    for value in (None, 5, np.zeros(3).__dlpack__):
        with pytest.raises(
            TypeError, match="logits: expected an array, found one whose __dlpack__"
        ):
            winnow.select(Described(lambda value=value: value), 3)
    for device in ("cpu", (), (1,), None, (2**40, 0)):
        with pytest.raises(TypeError, match="select: logits: .* cannot be read"):
            winnow.select(Described(lambda: None, device=device), 3)
    used = np.zeros((2, 3), np.float32).__dlpack__()
    winnow.select(Described(lambda: used), 1)
    with pytest.raises(TypeError, match="select: logits: .* cannot be read"):
        winnow.select(Described(lambda: used), 1)  # a capsule serves once


def test_choices_are_texts():
    """Enumerators of the library are the texts that Python takes."""
    rows, slots = torch.zeros(1, 576).bfloat16(), torch.zeros(1, dtype=torch.int64)
    plan = {"heads": 4, "pages": 4, "topk": 4}
    text = "scale: expected default, amax or pow2 for v32_fp8, found pow2_floor_amax"
    with pytest.raises(ValueError, match=f"^write: {text}$"):
        winnow.write(rows, slots, latent(), scale="pow2_floor_amax")
    text = "mode: expected mixed, separate or direct for an fp8 cache, found bf16"
    with pytest.raises(ValueError, match=f"^plan: {text}$"):
        winnow.Plan(**plan, mode="bf16")
    with pytest.raises(ValueError, match="^plan: mha: expected false with fp8, found true$"):
        winnow.Plan(**plan, precision="fp8", mha=True)
    with pytest.raises(ValueError, match="^select: block: expected 1 to .*, found 0$"):
        winnow.select(torch.zeros(1, 8), 2, block=0, best=1)
    with pytest.raises(ValueError, match=r"^select: within: expected \[1, any\] int32, found"):
        winnow.select(torch.zeros(1, 8), 2, block=8, within=ints(2, 1))


def test_interfaces_that_say_nothing():
    class Fake:
        __array_interface__ = {"shape": (3, 5), "typestr": "<f4", "data": (0, False), "version": 3}

    with pytest.raises(TypeError, match="expected an array .* found Fake"):
        winnow.select(Fake(), 3)
    full = {"shape": (2, 5), "typestr": "<f4", "data": (64, False), "version": 3}
    for interface in (
        {},
        None,
        {"shape": 3},
        {"shape": (1, 2), "data": ("here", False)},
        *({**full, "data": data} for data in (None, (), (64,), b"bytes", 5, [64, False])),
        *({**full, "shape": shape} for shape in (None, 5, [2, 5], (2, "five"))),
        {**full, "strides": (20,)},
    ):
        members = {"__array_interface__": property(lambda self, interface=interface: interface)}
        kind = type("Kind", (np.ndarray,), members)
        with pytest.raises(TypeError, match="select: logits: expected an array, found Kind"):
            winnow.select(np.zeros((2, 5), np.float32).view(kind), 3)


@pytest.mark.skipif(
    any(k.device == "cuda" and k.stage != "every stage" for k in winnow.support()),
    reason="this build has CUDA kernels",
)
def test_cuda_arrays_and_a_build_without_cuda():
    text = "found cuda:1: this winnow was built without CUDA; install it with `pip install"
    there = Described(lambda: raised(AssertionError("not asked")), device=(2, 1))
    with pytest.raises(NotImplementedError, match="select: logits: .*" + text):
        winnow.select(there, 3)
    with pytest.raises(NotImplementedError, match="Cache: data: .*" + text):
        winnow.Cache(there, "v32_fp8")
    with pytest.raises(NotImplementedError, match="Plan: device: .*" + text):
        winnow.Plan(pages=4, device="cuda:1")
    with pytest.raises(ValueError, match="expected a CPU or CUDA array, found DLPack device 8"):
        winnow.select(Described(None, device=(8, 0)), 3)
