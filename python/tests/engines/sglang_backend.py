"""SGLang's sparse attention backends over winnow's hooks, in a process of their own: SGLang's own
cases for these classes, with its pools, batches and metadata, on a Hopper GPU that is not there.

    python sglang_backend.py ANSWER.json

The answer has, for each case, what it raised ("" where it passed), and how often each of winnow's
functions was called.
"""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import itertools
import json
import sys
import types
import unittest

import hopper

hopper.pretend_gpu()

import torch
import transformers
from calls import counted

from winnow import flash_mla

# Packages that SGLang imports, and that its attention never calls here.
UNUSED = ("torchvision", "torchao", "interegular", "sgl_kernel", "flashinfer", "gguf", "uvicorn",
          "torch_memory_saver")  # fmt: skip


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Something


class Something(metaclass=Anything):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        # Decorators give what they were given.
        return args[0] if len(args) == 1 and callable(args[0]) else Something()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Something()


class Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of which every name is there and does nothing."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] not in UNUSED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        def find(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Something,), {}) if name[:1].isupper() else Something()

        module.__path__, module.__version__, module.__getattr__ = [], "0", find


def kernels() -> None:
    """FlashMLA's wheel, which refuses to compute: a case that passes was computed by winnow."""

    def refuse(name):
        def run(*args, **kwargs):
            raise RuntimeError(f"SGLang's own {name} was called")

        return run

    below = types.ModuleType("flash_mla")
    below.__path__ = []
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        setattr(below, name, refuse(name))

    def schedule(lengths, *args, **kwargs):
        return torch.zeros(1, 8).int(), torch.zeros(len(lengths) + 1).int()

    class FlashMLASchedMeta:
        def __init__(self, **fields):
            vars(self).update(fields)

    below.get_mla_decoding_metadata = schedule
    below.get_mla_metadata = lambda: (FlashMLASchedMeta(), None)
    below.fused_norm_rope_attn_rope_cast = types.ModuleType("flash_mla.mega")
    interface = types.ModuleType("flash_mla.flash_mla_interface")
    interface.FlashMLASchedMeta = FlashMLASchedMeta
    sys.modules.update({"flash_mla": below, interface.__name__: interface})


def hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from winnow.engines import sglang as plugin

    plugin._kernels_refused = lambda: ""
    assert plugin.register()
    HookRegistry.apply_hooks()


def without_plans() -> None:
    """Plans of other kernels, for selecting and compressing, which these cases have no use for and
    which SGLang compiles for the GPU at hand. Indexers plan nothing with this setting."""
    from sglang.kernels.ops.attention import dsv4
    from sglang.kernels.ops.attention.dsv4 import compress, topk
    from sglang.srt.environ import envs

    dsv4.plan_topk_v2 = topk.plan_topk_v2 = lambda lengths, **more: torch.zeros(1, 4).int()
    for plan in (compress.CompressorDecodePlan, compress.CompressorPrefillPlan):
        for name in ("generate", "generate_legacy", "generate_online"):
            setattr(plan, name, staticmethod(lambda *args, **more: None))
    envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.set(True)


def v32_cases():
    """Name and function of SGLang's cases for V3.2's backend, with each cache and kernel."""
    from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit

    for case in kit.make_dsa_sparse_cases("dsa"):
        # Quantising a long context takes Triton's interpreter minutes, and SGLang's sparse kernel
        # does not decode from fp8.
        pairs = [("flashmla_sparse", False)]
        if max(case.prefix_lens) < 2000:
            pairs += [("flashmla_kv", False), ("flashmla_kv", True)]
        for kernel, fp8 in pairs:
            yield (
                f"v32 {case.name} {kernel} {'fp8' if fp8 else 'bf16'}",
                functools.partial(
                    kit.run_dsa_sparse_attention_case,
                    unittest.TestCase(),
                    case,
                    device="cpu",
                    dsa_prefill_backend=kernel,
                    dsa_decode_backend=kernel,
                    fp8_kv_cache=fp8,
                ),
            )


def v4_cases():
    """The same for V4's: windows, and windows beside compressed states."""
    from sglang.srt.layers.attention import deepseek_v4_backend
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit

    deepseek_v4_backend.is_cuda = lambda: True
    test = unittest.TestCase()
    for case in kit.make_dsv4_cases("dsv4")[:7]:
        more = {"testcase": test, "device": "cpu"}
        yield f"v4 {case.name}", functools.partial(kit.run_dsv4_attention_case, case=case, **more)
        prefills = (False, True) if case.forward_mode.is_extend() else (False,)
        for ratio, sparse in itertools.product((4, 128), prefills):
            yield (
                f"v4 {case.name} ratio {ratio}{' rows' if sparse else ''}",
                functools.partial(
                    kit.run_dsv4_compress_attention_case,
                    case=dataclasses.replace(case, compress_ratio=ratio),
                    sparse_prefill=sparse,
                    # At least as many as a case chooses from.
                    extra_entries=64,
                    **more,
                ),
            )


def main(answer_path: str) -> None:
    for name in ("manual_seed_all", "get_rng_state", "set_rng_state"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    # Before torchvision seems to be there.
    transformers.utils.is_torchvision_available()
    sys.meta_path.append(Unused())
    kernels()
    hooks()
    calls = counted(flash_mla, ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"))
    without_plans()
    found = {}
    for name, run in itertools.chain(v32_cases(), v4_cases()):
        calls.clear()
        try:
            run()
            found[name] = {"raised": "", "calls": dict(calls)}
        except Exception as error:
            found[name] = {"raised": f"{type(error).__name__}: {error}", "calls": dict(calls)}
    with open(answer_path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
