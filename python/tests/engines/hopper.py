"""A Hopper GPU that is not there: vLLM's CUDA platform over CPU tensors, Triton by its interpreter.

``pretend()`` comes before anything imports vLLM's sparse modules. Afterwards vLLM chooses backends,
builds metadata and calls kernels as on an H200, and every tensor lies in the CPU's memory.
"""

from __future__ import annotations

import os
import sys
import types

# Operators live as long as the library that defined them.
_kept: list = []


class _NoStream:
    """A stream or event: nothing waits, since nothing is asynchronous."""

    cuda_stream = stream_id = device_index = 0

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: True


def _without_driver() -> None:
    """What torch asks the driver for, answered without one."""
    import torch

    def unpinned(function):
        def run(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)

        return run

    for name in ("zeros", "empty", "tensor", "full", "ones", "empty_like", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Stream = torch.cuda.Event = torch.Event = torch.Stream = _NoStream
    torch.cuda.current_stream = lambda *args, **kwargs: _NoStream()
    torch.cuda.stream = torch.cuda.set_stream = lambda *args, **kwargs: _NoStream()
    torch.cuda.synchronize = torch.accelerator.synchronize = lambda *args, **kwargs: None
    torch.cuda.set_device = torch.accelerator.set_device_index = lambda *args, **kwargs: None
    torch.accelerator.device_count = lambda: 1
    torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None


def _exact_interpreter() -> None:
    """Triton's interpreter rounds to fp8 and bf16 wrongly (half up without a carry, or cut off);
    torch's casts round as the GPU does."""
    import numpy as np
    import torch
    import triton.runtime.interpreter as interpreter

    theirs = interpreter._convert_float
    known = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
    }
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}

    def convert(data, source, target, rounding):
        a, b = known.get(str(source)), known.get(str(target))
        if a is None or b is None:
            return theirs(data, source, target, rounding)
        flat = np.frombuffer(data.tobytes(), dtype=np.uint8).copy()
        if flat.size == 0:
            return np.zeros(data.shape, bits[b.itemsize])
        got = torch.from_numpy(flat).view(a).float().to(b).view(torch.uint8).numpy()
        return got.view(bits[b.itemsize]).reshape(data.shape)

    interpreter._convert_float = convert

    # A mask of integers, which the compiler takes, is one of truth values.
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(self, pointers, mask, *rest):
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *rest)

    def masked_store(self, pointers, value, mask, *rest):
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _extensions() -> None:
    """vLLM's compiled modules import and are empty; FlashMLA's interface is winnow's."""
    import winnow.flash_mla

    for name in (
        "_C",
        "_moe_C",
        "_C_stable_libtorch",
        "_moe_C_stable_libtorch",
        "_flashmla_C",
        "_flashmla_extension_C",
        "vllm_flash_attn._vllm_fa2_C",
        "vllm_flash_attn._vllm_fa3_C",
    ):
        sys.modules.setdefault("vllm." + name, types.ModuleType("vllm." + name))
    import torch

    # What vLLM asks while it is imported; nothing of it is there.
    library = torch.library.Library("_C", "FRAGMENT")
    _kept.append(library)
    for name in (
        "cutlass_scaled_mm_supports_fp8",
        "cutlass_scaled_mm_supports_block_fp8",
        "cutlass_group_gemm_supported",
        "cutlass_scaled_mm_supports_fp4",
    ):
        library.define(f"{name}(int cuda_device_capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    interface = types.ModuleType("vllm.third_party.flashmla.flash_mla_interface")
    for name in winnow.flash_mla.__all__:
        setattr(interface, name, getattr(winnow.flash_mla, name))
    sys.modules[interface.__name__] = interface


def _platform() -> None:
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class PretendedHopper(NonNvmlCudaPlatform):
        device_type = "cpu"
        device_name = "cpu"
        dispatch_key = "CPU"
        dist_backend = "gloo"

        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 1 << 34

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 132

        @classmethod
        def is_pin_memory_available(cls):
            return False

        @classmethod
        def device_count(cls):
            return 1

        @classmethod
        def get_device_communicator_cls(cls):
            base = "vllm.distributed.device_communicators.base_device_communicator"
            return base + ".DeviceCommunicatorBase"

    platforms._current_platform = PretendedHopper()


def pretend_gpu() -> None:
    """A GPU for torch and Triton."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", HF_HUB_OFFLINE="1")
    _without_driver()
    _exact_interpreter()


def pretend() -> None:
    """The GPU, and vLLM's platform for it."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")
    pretend_gpu()
    _extensions()
    _platform()
