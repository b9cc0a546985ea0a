"""Whatever of vLLM's winnow stands in for takes the arguments that vLLM's own takes: a version that
hands over one more is seen here, and not in an engine's first step."""

import importlib
import inspect

from versions import since

from winnow.engines import hooks

MODULES = ["sparse_mla", "dense", "flashmla_sparse", "flashattn_mla_sparse", "indexer"]
# Importing these lets the plugin replace what is in them.
REPLACED = [
    "vllm.model_executor.layers.sparse_attn_indexer",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.models.deepseek_v4.attention",
    "vllm.models.deepseek_v4.nvidia.flashmla",
]
if since(0, 32):
    MODULES.append("cpu")
    REPLACED.append("vllm.models.deepseek_v4.cpu.cpu_sparse")


def classes():
    """winnow's classes that derive from vLLM's."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"winnow.engines.vllm.{name}")
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == module.__name__:
                if any(base.__module__.startswith("vllm.") for base in cls.__mro__):
                    found.append(cls)
    return found


def plain(method):
    return inspect.unwrap(getattr(method, "__func__", method))


def not_taken(ours, theirs, name):
    """Ways to call theirs in which ours cannot be called: by place, and all by name."""
    theirs, ours = inspect.signature(plain(theirs)), inspect.signature(plain(ours))
    kinds = [parameter.kind for parameter in theirs.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return []  # it does not say what it takes
    by_place, by_name = [], {}
    for parameter in theirs.parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY:
            by_name[parameter.name] = None
        elif parameter.kind != parameter.VAR_KEYWORD:
            by_place.append(parameter.name)
    kinds = [parameter.kind for parameter in ours.parameters.values()]
    first = 1 if by_place[:1] in (["self"], ["cls"]) else 0
    ways = [len(by_place)] if inspect.Parameter.VAR_POSITIONAL in kinds else [len(by_place), first]
    found = []
    for count in ways:
        named = {**by_name, **dict.fromkeys(by_place[count:])}
        try:
            ours.bind(*[None] * count, **named)
        except TypeError as error:
            found.append(f"{name}{ours} for {theirs}: {error}")
    return found


def test_methods_of_classes():
    seen, found = 0, []
    for cls in classes():
        # What vLLM's own backends leave open they never need.
        left = [base for base in cls.__mro__ if base.__module__.startswith("vllm.v1.attention.b")]
        theirs = [base for base in left if base.__module__ != "vllm.v1.attention.backend"]
        abstract = set(getattr(cls, "__abstractmethods__", ()))
        assert abstract <= set().union(*(base.__abstractmethods__ for base in theirs)), cls
        names = {
            name
            for base in cls.__mro__
            if base.__module__.startswith("winnow.")
            for name, value in vars(base).items()
            if callable(plain(value)) and not isinstance(value, type)
        }
        for name in sorted(names - {"__init__"}):
            defining = [base for base in cls.__mro__ if name in vars(base)]
            theirs = [base for base in defining if base.__module__.startswith("vllm.")]
            if theirs and defining[0].__module__.startswith("winnow."):
                ours = vars(defining[0])[name]
                found += not_taken(ours, vars(theirs[0])[name], f"{cls.__name__}.{name}")
                seen += 1
    assert not found and seen > 10


def test_replaced_functions(plugin, monkeypatch, lines):
    changed = []
    put = hooks.Changes.set

    def recorded(self, owner, name, value):
        changed.append((owner, name, vars(owner)[name], value))
        put(self, owner, name, value)

    monkeypatch.setattr(hooks.Changes, "set", recorded)
    monkeypatch.setenv("WINNOW_VLLM_LAYERS", "1")
    assert plugin.register()
    for name in REPLACED:
        importlib.import_module(name)
    found = []
    for owner, name, theirs, ours in changed:
        if name != "__init__":
            found += not_taken(ours, theirs, f"{owner.__name__}.{name}")
    if since(0, 32):
        cpu = importlib.import_module("winnow.engines.vllm.cpu")
        for name, ours in cpu.METHODS.items():
            found += not_taken(ours, vars(cpu.CpuPlatform)[name], name)
    assert not found and not lines and len(changed) > 8
