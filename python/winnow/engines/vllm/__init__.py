"""winnow in vLLM: its sparse MLA attention by winnow's kernels.

vLLM calls ``register`` at the start of each of its processes, through the entry point
``vllm.general_plugins`` of the installed package. ``WINNOW_VLLM=0`` leaves vLLM alone.

Nothing here may stop vLLM. A version that was never tried is declined, whatever goes wrong while
registering is undone, and whatever speaks against winnow when a model is loaded (another dtype,
another GPU, a build of winnow without CUDA) gives that model vLLM's own class. Each of these is
one line in vLLM's log.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable

__all__ = ["register", "version_refused"]

# A child of vLLM's logger, so that its lines appear where vLLM's do.
_log = logging.getLogger("vllm.winnow")

# The first and the last minor version of vLLM whose classes winnow's were written against.
_FIRST, _LAST = (0, 26), (0, 32)

# vLLM's name of a backend -> module and class of winnow's. A module imports vLLM's class, which may
# fail where the other's does not.
_BACKENDS = {
    "FLASHMLA_SPARSE": ("flashmla_sparse", "WinnowFlashMLASparseBackend"),
    "FLASH_ATTN_MLA_SPARSE": ("flashattn_mla_sparse", "WinnowFlashAttnMLASparseBackend"),
}


class Changes:
    """Changes to another package's objects that can be taken back, last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def add(self, undo: Callable[[], object]) -> None:
        self._undo.append(undo)

    def set(self, owner: object, name: str, value: object) -> None:
        """owner.name = value, for an attribute that owner itself holds."""
        before = vars(owner)[name]
        setattr(owner, name, value)
        self.add(lambda: setattr(owner, name, before))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


_changes = Changes()


def version_refused(version: str) -> str:
    """Why winnow stays away from this version of vLLM; "" if it does not."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and _FIRST <= (int(found[1]), int(found[2])) <= _LAST:
        return ""
    first, last = (".".join(map(str, v)) for v in (_FIRST, _LAST))
    return f"vLLM {version} was never tried, only {first} to {last}"


def register() -> bool:
    """Called by vLLM, possibly several times. True if vLLM's sparse MLA backends are winnow's now."""
    if os.environ.get("WINNOW_VLLM") == "0" or importlib.util.find_spec("vllm") is None:
        return False
    unregister()
    try:
        refused = version_refused(importlib.import_module("vllm").__version__)
        if refused:
            _log.warning("winnow: not used: %s", refused)
            return False
        _register_backends()
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
