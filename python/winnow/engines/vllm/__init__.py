"""winnow in vLLM: its sparse MLA attention by winnow's kernels.

vLLM calls ``register`` at the start of each of its processes, through the entry point
``vllm.general_plugins`` of the installed package. ``WINNOW_VLLM=0`` leaves vLLM alone.

Nothing here may stop vLLM. A version that was never tried is declined, whatever goes wrong while
registering is undone, and whatever speaks against winnow when a model is loaded (another dtype,
another GPU, a build of winnow without CUDA) gives that model vLLM's own class. Each of these is
one line in vLLM's log. So is a switch with another value than 0 and 1.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import warnings

from winnow.engines import switches
from winnow.engines.hooks import Changes, when_imported

__all__ = ["register", "version_refused"]

# Whether winnow is used at all, and for what stands around V4's attention.
SWITCH, LAYERS_SWITCH = "WINNOW_VLLM", "WINNOW_VLLM_LAYERS"
SWITCHES = (SWITCH, LAYERS_SWITCH)

# A child of vLLM's logger, so that its lines appear where vLLM's do.
_log = logging.getLogger("vllm.winnow")

# The first and the last minor version of vLLM whose classes winnow's were written against.
_FIRST, _LAST = (0, 26), (0, 33)
# Before it vLLM's MLA layer asks for dense attention as well, which it has on GPUs only.
_FIRST_CPU = (0, 32)

# vLLM's name of a backend -> module and class of winnow's. A module imports vLLM's class, which may
# fail where the other's does not.
_BACKENDS = {
    "FLASHMLA_SPARSE": ("flashmla_sparse", "WinnowFlashMLASparseBackend"),
    "FLASH_ATTN_MLA_SPARSE": ("flashattn_mla_sparse", "WinnowFlashAttnMLASparseBackend"),
}


_changes = Changes()


def _minor(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def version_refused(version: str) -> str:
    """Why winnow stays away from this version of vLLM; "" if it does not."""
    if _FIRST <= _minor(version) <= _LAST:
        return ""
    first, last = (".".join(map(str, v)) for v in (_FIRST, _LAST))
    return f"vLLM {version} was never tried, only {first} to {last}"


def register() -> bool:
    """Called by vLLM, several times as well. True if winnow stands behind its backends now."""
    if importlib.util.find_spec("vllm") is None:
        return False
    unregister()
    refused = switches.refused(*SWITCHES)
    if refused:
        _log.warning("winnow: not used: %s", refused)
        return False
    if switches.asked(SWITCH) is False:
        return False
    try:
        version = importlib.import_module("vllm").__version__
        refused = version_refused(version)
        if refused:
            _log.warning("winnow: not used: %s", refused)
            return False
        _register_backends()
        _replace_indexer()
        _replace_v4()
        _extend_cpu_platform()
    except Exception as error:
        unregister()
        _log.warning("winnow: not used: %s: %s", type(error).__name__, error)
        return False
    return True


def unregister() -> None:
    """Takes back what register() did."""
    _changes.undo()


def _register_backends() -> None:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    for name in _BACKENDS:
        backend = registry.AttentionBackendEnum[name]
        if backend.is_overridden():
            raise RuntimeError(f"{name} is already {backend.get_path()}")
        _changes.add(backend.clear_override)
        registry.register_backend(backend, f"{__name__}.{name}")


def _replace_indexer() -> None:
    layers = "vllm.model_executor.layers.sparse_attn_indexer"
    when_imported(layers, _careful(_replace_indexer_function), _changes)
    when_imported("vllm.model_executor.models.deepseek_v2", _careful(_replace_cache), _changes)


def _careful(function):
    """function, but what goes wrong in it is taken back and becomes a line in the log."""

    def run(module):
        changes = Changes()
        try:
            function(module, changes)
        except Exception as error:
            changes.undo()
            _log.warning(
                "winnow: not used in %s: %s: %s", module.__name__, type(error).__name__, error
            )
        else:
            _changes.add(changes.undo)

    return run


def _replace_indexer_function(layers, changes: Changes) -> None:
    """The function, for modules that import it later; the operator; the layer around it."""
    import torch
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.platforms import current_platform

    from winnow.engines.vllm import indexer

    changes.set(layers, "sparse_attn_indexer", indexer.sparse_attn_indexer)
    library = torch.library.Library("vllm", "IMPL")
    changes.add(library._destroy)
    with warnings.catch_warnings():
        # That a function takes the place of another is what is wanted here.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        library.impl(
            "sparse_attn_indexer",
            indexer.sparse_attn_indexer,
            current_platform.dispatch_key,
            allow_override=True,
        )
    name = layers.SparseAttnIndexer.__name__
    if name in op_registry_oot:
        raise RuntimeError(f"{name} is already {op_registry_oot[name]}")
    layers.SparseAttnIndexer.register_oot(indexer.WinnowSparseAttnIndexer)
    changes.add(lambda: op_registry_oot.pop(name))


def _replace_cache(models, changes: Changes) -> None:
    """The metadata of the indexer's layers, which decides whose function serves a layer."""
    from vllm.platforms import current_platform

    from winnow.engines.vllm import indexer

    cache = models.DeepseekV32IndexerCache
    for name, method in indexer.cache_methods(cache, indexer.WinnowIndexerBackend).items():
        changes.set(cache, name, method)
    if current_platform.is_cpu():
        from winnow.engines.vllm import cpu

        changes.set(models, "per_token_group_quant_fp8", cpu.quantise_queries)


def _replace_v4() -> None:
    v4 = "vllm.models.deepseek_v4"
    when_imported(f"{v4}.attention", _careful(_replace_v4_cache), _changes)
    when_imported(f"{v4}.nvidia.flashmla", _careful(_replace_v4_layer), _changes)
    when_imported(f"{v4}.cpu.cpu_sparse", _careful(_replace_v4_on_cpu), _changes)


def _replace_v4_cache(attention, changes: Changes) -> None:
    from winnow.engines.vllm import indexer

    cache = attention.DeepseekV4IndexerCache
    for name, method in indexer.cache_methods(cache, indexer.WinnowV4IndexerBackend).items():
        changes.set(cache, name, method)
    if _layers_refused():
        return
    from winnow.engines.vllm import v4, v4_layer

    layer = attention.DeepseekV4Attention
    methods = v4_layer.attention_methods(layer)
    if switches.asked(LAYERS_SWITCH):
        methods |= v4_layer.window_methods(layer, v4.causal)
    for name, method in methods.items():
        changes.set(layer, name, method)
    function = v4_layer.index_query_function(attention.fused_indexer_q_rope_quant)
    changes.set(attention, "fused_indexer_q_rope_quant", function)
    compressor = attention.DeepseekCompressor
    changes.set(compressor, "forward", v4_layer.compressor_method(compressor))


def _layers_refused() -> str:
    """Why what stands around V4's attention stays vLLM's; "" if winnow's takes its place. On a CPU
    vLLM has classes of its own for it, which are replaced as a whole."""
    from vllm.platforms import current_platform

    from winnow.engines.vllm.sparse_mla import refused

    if not current_platform.is_cuda():
        return "another platform"
    if switches.asked(LAYERS_SWITCH) is False:
        return "switched off"
    return refused()


def _replace_v4_layer(flashmla, changes: Changes) -> None:
    from winnow.engines.vllm import v4

    layer = flashmla.DeepseekV4FlashMLAAttention
    for name, method in v4.layer_methods(layer).items():
        changes.set(layer, name, method)


def _replace_v4_on_cpu(cpu_sparse, changes: Changes) -> None:
    from winnow.engines.vllm import v4_cpu

    v4_cpu.replace(changes)


def _extend_cpu_platform() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        if _minor(importlib.import_module("vllm").__version__) < _FIRST_CPU:
            _log.warning("winnow: not used: on a CPU it takes vLLM 0.32")
            return
        from winnow.engines.vllm import cpu

        for name, method in cpu.METHODS.items():
            _changes.set(cpu.CpuPlatform, name, method)


def __getattr__(name: str):
    # vLLM imports the path that it was given whenever it looks for a backend, with its
    # configuration at hand. The class found here then goes by its own path.
    if name not in _BACKENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _backend(name)


def _backend(name: str) -> type:
    """winnow's class for a backend of vLLM, or vLLM's own where something speaks against it."""
    module, ours = _BACKENDS[name]
    try:
        refused = importlib.import_module(f"{__name__}.sparse_mla").refused()
        if not refused:
            return getattr(importlib.import_module(f"{__name__}.{module}"), ours)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    _log.warning("winnow: not used for %s: %s", name, refused)
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    utils = importlib.import_module("vllm.utils.import_utils")
    return utils.resolve_obj_by_qualname(registry.AttentionBackendEnum[name].value)
