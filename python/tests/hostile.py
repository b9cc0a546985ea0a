"""Calls of every public function with damaged arguments, in a process of their own.

    python python/tests/hostile.py --seconds 600 --seed 1     # as many calls as fit
    python python/tests/hostile.py --seed 1 --case 4711       # one of them again

A call gives a clean exception, with nothing written; or a result, which is the reference kernel's,
with nothing written beside the outputs. Arguments lie between guard bytes, which stay as they are.
"""

from __future__ import annotations

import argparse
import inspect
import mmap
import random
import re
import resource
import time

import numpy as np
import torch

import winnow
import winnow.flash_mla
import winnow.hf
import winnow.torch
from damage import OBJECTS, Mine, damaged
from test_torch import arguments as operator_arguments

INT = torch.int32
GUARD = 64  # bytes before and behind every array

# What a function of the extension may raise, and what Python code around it may raise as well.
DOCUMENTED = (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError)
OF_PYTHON = (*DOCUMENTED, AttributeError, LookupError, OverflowError)
# What no message may say: C++'s words, and the library's names of arguments.
NOT_FOR_USERS = ("std::", "lists[", "indexer.", "bad_cast", "nanobind")


class Guarded:
    """Arrays of one call, each between guard bytes, and what they held before it."""

    def __init__(self):
        self.held = []

    def tensor(self, source: torch.Tensor) -> torch.Tensor:
        item = source.element_size()
        bytes_ = torch.randint(0, 256, (source.numel() * item + 2 * GUARD,), dtype=torch.uint8)
        inner = bytes_[GUARD : GUARD + source.numel() * item].view(source.dtype).view(source.shape)
        inner.copy_(source)
        self.held.append([bytes_, None])
        return inner

    def remember(self):
        for entry in self.held:
            entry[1] = entry[0].clone()

    def changed(self, outputs=()) -> bool:
        """Whether a byte is another one now, those of the outputs apart."""
        free = {x.untyped_storage().data_ptr() for x in outputs}
        for now, before in self.held:
            if now.untyped_storage().data_ptr() in free:
                now, before = (torch.cat([x[:GUARD], x[-GUARD:]]) for x in (now, before))
            if not torch.equal(now, before):
                return True
        return False


class OneRank:
    """A group of one: nothing is ever sent."""

    rank, size, name, takes_cuda = 0, 1, "one", False

    def all_gather(self, send, recv, nbytes):
        raise AssertionError("one rank has nobody to ask")

    all_to_all = exchange = all_gather


def plan_for(tokens: int) -> winnow.Plan:
    plan = winnow.Plan(
        heads=2, topk=5, index_heads=4, page=8, pages=3, max_tokens=4, max_requests=4
    )
    plan.refill(list(range(tokens + 1)), [4] * tokens)
    return plan


def of_parts(function):
    """The function, which takes dicts, with their arguments one by one: "write.1.kv"."""

    def call(**flat):
        whole, parts = {}, {}
        for key, value in flat.items():
            name, _, rest = key.partition(".")
            if not rest:
                whole[name] = value
                continue
            number, _, inner = rest.partition(".")
            parts.setdefault(name, {}).setdefault(number, {})[inner] = value
        for name, dicts in parts.items():
            listed = [dicts[number] for number in sorted(dicts)]
            whole.setdefault(name, listed if len(listed) > 1 else listed[0])
        return function(**whole)

    call.__doc__ = function.__doc__
    return call


def numbered(name: str, *parts: dict) -> dict:
    return {f"{name}.{i}.{k}": v for i, part in enumerate(parts) for k, v in part.items()}


def calls() -> dict:
    """Name -> (function, keywords) of a good call of every public function."""
    every = operator_arguments()
    made = {}
    for name, (args, kwargs) in every.items():
        schema = getattr(torch.ops.winnow, name).default._schema
        named = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        made[f"ops.{name}"] = getattr(torch.ops.winnow, name), named
    own = {name: dict(named) for name, (_, named) in made.items()}

    def latent(fmt, data, page):
        return winnow.Cache(data, fmt, page)

    def plain(name):
        return own[f"ops.{name}"]

    attend = plain("attend")
    fmt, page = attend.pop("format"), attend.pop("page")
    attend["cache"] = latent(fmt, attend["cache"], page)
    attend["extra_cache"] = latent(fmt, attend["extra_cache"], attend.pop("extra_page"))
    attend |= {"lengths": torch.tensor([5, 2, 0], dtype=INT), "lse": True, "part": 0}
    attend |= {"out": torch.zeros(3, 2, 512, dtype=torch.bfloat16), "empty_lse_negative": False}
    write = plain("write_")
    write["cache"] = latent(write.pop("format"), write["cache"], write.pop("page"))
    gather = plain("gather")
    gather["cache"] = latent(gather.pop("format"), gather["cache"], gather.pop("page"))
    for name in ("score", "score_select"):
        c = plain(name)
        c["keys"] = latent("index_keys", c["keys"], c.pop("page"))
    compress = plain("compress_")
    compress["cache"] = latent("v4_fp8", compress["cache"], compress.pop("page"))
    plain("score")["clean"] = True
    plain("locate")["counts"] = True
    plain("select")["out"] = torch.zeros(3, 4, dtype=INT)
    for name in every:
        public = name.rstrip("_")
        # Operators for each form of rotate() and of selection, which have arguments for them.
        if not public.endswith(("_e4m3", "_best")):
            made[public] = getattr(winnow, public), own[f"ops.{name}"]
    q = torch.randn(3, 2, 576).bfloat16()
    keys = winnow.Cache(torch.zeros(3, 8 * 132, dtype=torch.uint8), "index_keys", 8)
    memory = torch.zeros(winnow.cache_shape("v32_fp8", 3, 8), dtype=torch.uint8)
    table = torch.tensor([[2], [0], [1]], dtype=INT)
    slots = torch.tensor([16, 0, 8])
    indices = torch.randint(-1, 24, (3, 5), dtype=INT)
    plan = plan_for(3)
    made["attend with a plan"] = winnow.attend, {
        "q": q, "cache": winnow.Cache(memory, "v32_fp8", 8), "indices": indices, "scale": 0.1,
        "plan": plan, "part": 0, "workspace": torch.zeros(plan.workspace_bytes, dtype=torch.uint8),
    }  # fmt: skip
    made["pipeline"] = winnow.pipeline, {
        "plan": plan, "q": q, "kv": torch.randn(3, 576).bfloat16(), "slots": slots,
        "cache": winnow.Cache(memory, "v32_fp8", 8), "block_table": table, "index_table": table,
        "index_k": torch.randn(3, 128).bfloat16(), "index_slots": slots, "index_keys": keys,
        "index_q": torch.randint(0, 120, (3, 4, 128), dtype=torch.uint8), "scale": 0.1,
        "index_weights": torch.rand(3, 4), "lse": True,
    }  # fmt: skip
    rows = [{"x": torch.randn(3, n).bfloat16(), "weight": torch.rand(n)} for n in (256, 128)]
    index_rows = {"kv": torch.randn(3, 128).bfloat16(), "slots": slots, "norm": "layer"}
    index_cache = winnow.Cache(torch.zeros(3, 8 * 132, dtype=torch.uint8), "index_keys", 8)
    made["norm_write"] = of_parts(winnow.norm_write), {
        **numbered("norm", *rows),
        **numbered("write", plain("write_"), index_rows | {"cache": index_cache}),
    }  # fmt: skip
    made["prepare_queries"] = of_parts(winnow.prepare_queries), {
        **numbered("query", plain("prepare_query")), **numbered("index", plain("index_query")),
    }  # fmt: skip
    made["norm_write of other things"] = winnow.norm_write, {"norm": rows, "write": None}
    made["cut"] = winnow.cut, {
        "ids": indices, "values": torch.rand(3, 5), "interleave": 2, "form": "auto", "counts": True,
        "positions": True,
    }  # fmt: skip
    made["combine"] = winnow.combine, {
        "partial_out": torch.rand(3, 2, 16), "partial_lse": torch.rand(3, 2),
        "sink": torch.zeros(2), "wire": "f32", "lse": True,
    }  # fmt: skip
    made["shard_batch"] = winnow.shard_batch, {
        "query_starts": [0, 1, 3], "seq_lens": [4, 5], "world": 2, "rank": 1, "interleave": 2,
    }  # fmt: skip
    # One rank reads its own caches: the call checks its arguments and gathers nothing.
    alone = winnow.Plan(
        heads=2, topk=5, index_heads=4, page=8, pages=3, max_requests=4, max_tokens=4,
        comm=OneRank(), spread="queries", sharded=True,
    )  # fmt: skip
    alone.refill([0, 1, 2, 3], [4, 5, 1])
    made["gather_prefix"] = winnow.gather_prefix, {
        "plan": alone, "cache": winnow.Cache(memory, "v32_fp8", 8), "block_table": table,
        "index_keys": keys, "index_table": table, "out": torch.zeros(0, dtype=torch.uint8),
    }  # fmt: skip
    made["pipeline_workspace_bytes"] = winnow.pipeline_workspace_bytes, {"plan": plan}
    made["Cache"] = winnow.Cache, {"data": memory, "format": "v32_fp8", "page": 8}
    made["Plan"] = winnow.Plan, {
        "model": "v32", "heads": 2, "topk": 5, "extra_topk": 0, "ratio": 0, "index_heads": 4,
        "page": 8, "pages": 3, "max_requests": 4, "max_tokens": 4, "max_context": 0,
        "decode_threshold": 1, "uniform_decode": False, "mode": "auto", "mha": False,
        "workspace_rows": 0, "split": "balanced", "split_size": 512, "device": "cpu",
    }  # fmt: skip
    spare = plan_for(3)  # the others' plan stays as it is
    made["Plan.refill"] = spare.refill, {"query_starts": [0, 1, 3], "seq_lens": [4, 5], "tokens": 3}
    made["Plan.schedule"] = spare.schedule, {"part": 0}
    made["Plan.kernel"] = spare.kernel, {"stage": "attend"}
    made["Plan.reasons"] = spare.reasons, {"stage": "attend"}
    starts, lens = [0, 2, 3], [4, 5]
    made["request_ids"] = winnow.request_ids, {"query_starts": starts, "tokens": 4}
    made["prefill_request_ids"] = winnow.prefill_request_ids, {"query_starts": starts, "decodes": 1}
    made["split_batch"] = winnow.split_batch, {
        "query_starts": starts, "threshold": 1, "uniform": False, "tokens": 3,
    }  # fmt: skip
    made["prefill_chunks"] = winnow.prefill_chunks, {"seq_lens": lens, "rows": 6}
    made["workspace_starts"] = winnow.workspace_starts, {"seq_lens": lens, "chunks": [(0, 2)]}
    made["v4_prefill_chunks"] = winnow.v4_prefill_chunks, {
        "query_lens": [2, 1], "seq_lens": lens, "max_model_len": 64, "max_batched_tokens": 8,
        "ratio": 4, "window": 4,
    }  # fmt: skip
    made["c128a_width"] = winnow.c128a_width, {"max_position": 600, "ratio": 128}
    made["cache_formats"] = winnow.cache_formats, {"model": winnow.V4}
    made["supports_heads"] = winnow.supports_heads, {"heads": 3}
    made["record_dim"] = winnow.record_dim, {"format": "v4_fp8"}
    made["page_bytes"] = winnow.page_bytes, {"format": "v4_fp8", "page": 64}
    made["page_bytes_used"] = winnow.page_bytes_used, {"format": "v4_fp8", "page": 64}
    made["cache_shape"] = winnow.cache_shape, {"format": "v4_fp8", "pages": 3, "page": 64}
    made["Chunk"] = winnow.Chunk, {"first": 0, "last": 2}
    made["flash_mla.flash_mla_with_kvcache"] = winnow.flash_mla.flash_mla_with_kvcache, {
        "q": q[:, None], "k_cache": memory.view(3, 8, 1, 656), "block_table": None,
        "cache_seqlens": None, "head_dim_v": 512, "softmax_scale": 0.1, "is_fp8_kvcache": True,
        "indices": indices[:, None], "topk_length": torch.tensor([5, 2, 0], dtype=INT),
    }  # fmt: skip
    made["flash_mla.flash_mla_sparse_fwd"] = winnow.flash_mla.flash_mla_sparse_fwd, {
        "q": q, "kv": torch.randn(9, 1, 576).bfloat16(), "indices": indices[:, None],
        "sm_scale": 0.1, "d_v": 512, "attn_sink": torch.zeros(2),
    }  # fmt: skip
    heads = torch.randn(1, 2, 5, 16)
    made["hf.attention"] = winnow.hf.attention, {
        "module": torch.nn.Module(), "query": heads, "key": heads, "value": heads,
        "attention_mask": torch.zeros(1, 1, 5, 5), "scaling": 0.3, "dropout": 0.0,
        "indices": torch.randint(0, 5, (1, 5, 3), dtype=INT), "s_aux": torch.zeros(2),
    }  # fmt: skip
    return made


# What a call writes into arguments of its own.
WRITTEN = {
    "write": ["cache"],
    "ops.write_": ["cache"],
    "pipeline": ["cache", "index_keys", "out", "workspace"],
    "attend with a plan": ["workspace"],
    "norm_write": ["write.0.cache", "write.1.cache"],
    "ops.norm_write_": ["cache", "index_cache"],
    "compress": ["cache", "state", "latent"],
    "ops.compress_": ["cache", "state", "latent"],
}
# Results that need not be the reference's: the indexer's choice among keys that differ by less than
# the kernels' rounding, a plan's properties, and numbers that a NaN or an infinity is among.
NOT_COMPARED = {"score_select", "pipeline", "Plan", "Cache", "attend with a plan"}
# Nor are rows of tokens whose position is outside the table: they stay as they were.
for verb in ("rotate", "prepare_query", "index_query", "prepare_queries"):
    NOT_COMPARED |= {verb, f"ops.{verb}"}

# Arguments without which parts of a new array are not written.
UNDEFINED = {"score": {"clean"}, "gather": {"lengths", "out_starts", "rows"}}


def memory_of(value):
    """The tensor behind an argument; None where there is none."""
    try:
        value = value.data if isinstance(value, winnow.Cache) else value
    except TypeError:  # an object that was never initialised
        return None
    return value if isinstance(value, torch.Tensor) and value.device.type == "cpu" else None


def ordinary(value, hurt: bool) -> bool:
    """Whether sums over these values stay finite, so that kernels agree on them."""
    if isinstance(value, winnow.Cache):
        return not hurt  # its records may be any bytes
    if isinstance(value, float):
        return abs(value) < 1e4
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return bool((value.float().abs() < 1e4).all())
    return True


def copied(value, guarded: Guarded):
    if isinstance(value, torch.Tensor):
        return guarded.tensor(value)
    if isinstance(value, winnow.Cache):
        return winnow.Cache(guarded.tensor(value.data), value.format, value.page)
    return value


def same(got, want) -> bool:
    """Equal integers; floats within what the kernels' order of summation can change."""
    if isinstance(got, (tuple, list)):
        return len(got) == len(want) and all(same(a, b) for a, b in zip(got, want, strict=True))
    if isinstance(got, np.ndarray):
        if got.dtype.kind in "iub":
            return np.array_equal(got, want)
        got, want = (torch.from_numpy(x.astype(np.float32)) for x in (got, want))
    if not isinstance(got, torch.Tensor):
        return got == want
    if not got.is_floating_point():
        return torch.equal(got, want)
    got, want = got.double(), want.double()
    finite = torch.isfinite(got) & torch.isfinite(want)
    scale = want[finite].abs().max().clamp_min(1) if finite.any() else 1
    return bool(((got - want).abs()[finite] <= scale / 32).all())


def one_call(made: dict, seed: int, case: int) -> str:
    """Runs a case. How it went; raises AssertionError where that is not as it should be."""
    r = random.Random(seed * 2**40 + case)
    torch.manual_seed(r.getrandbits(40))
    name = r.choice(sorted(made))
    function, good = made[name]
    guarded = Guarded()
    keywords = {k: copied(v, guarded) for k, v in good.items()}
    hurt = r.sample(sorted(keywords), min(len(keywords), r.choice([1, 1, 1, 2, 3])))
    exact = name.split(".")[-1] in ("Cache", "Chunk") or "." in name
    allowed = OF_PYTHON if exact else DOCUMENTED
    try:
        for argument in hurt:
            keywords[argument] = damaged(keywords[argument], r)
    except (*OF_PYTHON, Mine):
        return "refused"  # a Cache that cannot be made
    if r.random() < 0.05:
        keywords.pop(r.choice(sorted(keywords)), None)
    if r.random() < 0.03:
        keywords[r.choice(["topk", "nothing", "out", "kernel"])] = r.choice(OBJECTS)
    written = [
        x for k in ["out", *WRITTEN.get(name, [])] if (x := memory_of(keywords.get(k))) is not None
    ]
    what = f"{name} with {hurt} damaged"
    guarded.remember()
    try:
        got = function(**keywords)
    except (*allowed, Mine) as e:
        assert not guarded.changed(), f"{what}: raised {e!r} and wrote"
        message = "" if isinstance(e, MemoryError) else str(e)
        found = [
            words for words in NOT_FOR_USERS if words in message and "incompatible" not in message
        ] + re.findall(r"\bk[A-Z]\w+", message)
        assert not found, f"{what}: {message}"
        return "refused"
    assert not guarded.changed(written), f"{what}: wrote beside its outputs"
    undefined = UNDEFINED.get(name, set()) & (set(hurt) | good.keys() - keywords.keys())
    has_kernels = "kernel: str" in (function.__doc__ or "")
    if "kernel" in keywords or name in NOT_COMPARED or undefined or not has_kernels:
        return "served"
    if not all(ordinary(v, k in hurt) for k, v in keywords.items()):
        return "served"
    outputs = {
        k: torch.empty_like(x) for k in ("out",) if (x := memory_of(keywords.get(k))) is not None
    }
    try:
        want = function(**{**keywords, **outputs, "kernel": "reference"})
    except MemoryError:  # for a second result of this size
        return "served"
    assert same(got, want), f"{what}: {got} is not the reference's {want}"
    return "served"


def sweep(seed: int, seconds: float, progress=None) -> dict:
    """Cases until the time is over; counts by how they went."""
    made, counts, until, case = calls(), {"refused": 0, "served": 0}, time.monotonic() + seconds, 0
    while time.monotonic() < until:
        if progress is not None:
            progress[:8] = case.to_bytes(8, "little")
        try:
            counts[one_call(made, seed, case)] += 1
        except Exception as e:
            raise AssertionError(f"seed {seed}, case {case}: {type(e).__name__}: {e}") from e
        case += 1
    return counts


def limit_memory(more: int) -> None:
    """Sizes out of the blue then are a MemoryError, and do not fill the machine."""
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--progress", help="a file of 8 bytes for the number of the running case")
    options = parser.parse_args()
    limit_memory(1 << 30)
    if options.case is not None:
        print(one_call(calls(), options.seed, options.case))
        return
    progress = None
    if options.progress:
        with open(options.progress, "r+b") as f:
            progress = mmap.mmap(f.fileno(), 8)
    counts = sweep(options.seed, options.seconds, progress)
    print(f"{sum(counts.values())} calls: {counts['refused']} refused, {counts['served']} served")


if __name__ == "__main__":
    main()
