"""Changes to an engine's modules: made when a module is imported, and taken back on request."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


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


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after the module's own code has run."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self._name, self._function = name, function

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self._function(module)

        spec.loader.exec_module = exec_module
        return spec


def when_imported(name: str, function: Callable[[ModuleType], None], changes: Changes) -> None:
    """function(module) as soon as the module is there. Engines import their models late, in
    processes of their own, so importing them here would be too early."""
    if name in sys.modules:
        function(sys.modules[name])
        return
    finder = _AfterImport(name, function)
    sys.meta_path.insert(0, finder)
    changes.add(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)
