"""What the layers of both families share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from winnow import _winnow
from winnow.torch.caches import Records, State
from winnow.torch.paging import Pages
from winnow.torch.step import Step

INDEX_DIM = 128
_MOST_HEADS = 128


def check_sizes(config, *names: str) -> None:
    """Before weights are read: sizes that no verb takes, or that would count as others."""
    for name in names:
        size = getattr(config, name)
        heads = name.endswith("heads")
        if not hasattr(size, "__index__"):
            found = type(size).__name__
            raise TypeError(f"layers: config: {name}: expected an int, found {found}")
        if size < 1 or (heads and size > _MOST_HEADS):
            expected = f"1 to {_MOST_HEADS}" if heads else "1 or more"
            raise ValueError(f"layers: config: {name}: expected {expected}, found {size}")


def check_flags(config, *names: str) -> None:
    """A bool of Python or of NumPy, as the verbs take it: "no" would count as True."""
    for name in names:
        kind = type(getattr(config, name))
        of_numpy = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
        if kind is not bool and not of_numpy:
            raise TypeError(f"layers: config: {name}: expected a bool, found {kind.__name__}")


class FloatLinear(nn.Module):
    """x [tokens, columns] bf16 -> x · weightᵀ in fp32, as DeepSeek's code and vLLM have V4's rows.

    The CPU has no such product of bf16 matrices: there, the same values are held in fp32.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self._choose_dtype()

    def _choose_dtype(self) -> None:
        self.weight = self.weight.bfloat16() if self.weight.is_cuda else self.weight.float()

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self._choose_dtype()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return x.float() @ self.weight.T


class Layer(nn.Module):
    """Weights as buffers, and a place among the layers of LayerCaches.

    y = layer(x, step): x [tokens, hidden] after the layer's input norm. A subclass implements
    `attend`.
    """

    has_indexer = False  # then there are index_q and index_w
    index_rope: Mapping[str, str] = {}  # `pairs` and `slice` of index queries, for the verbs

    def __init__(self, stores: list[Records | State]):
        super().__init__()
        self.stores = stores

    def forward(self, x: Tensor, step: Step) -> Tensor:
        if not step.open:
            raise ValueError(
                "layers: step: it is committed, or one of its requests has changed since begin()"
            )
        expected = [step.tokens, self.config.hidden]
        if list(x.shape) != expected:
            raise ValueError(f"layers: x: expected {expected}, found {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"layers: x: expected floating point, found {x.dtype}")
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("layers: x: inference only: run under torch.no_grad()")
        step.caches.start(step, self)
        with torch.no_grad():
            # Autocast would turn the products into fp16, or V4's in fp32 into bf16.
            kind = x.device.type
            if not torch.is_autocast_enabled(kind):
                return self.attend(x.bfloat16(), step)
            with torch.autocast(kind, enabled=False):
                return self.attend(x.bfloat16(), step)

    def attend(self, x: Tensor, step: Step) -> Tensor:
        raise NotImplementedError

    def keep(self, name: str, tensor: Tensor) -> None:
        """Weights follow .to(device), and stay out of state_dict(): they are not a checkpoint's."""
        self.register_buffer(name, tensor, persistent=False)

    def _apply(self, fn, recurse: bool = True):
        """.to(dtype) of a model around it leaves the dtypes that the verbs take."""

        def moved(tensor: Tensor) -> Tensor:
            there = fn(tensor)
            return there if there.dtype == tensor.dtype else tensor.to(there.device)

        return super()._apply(moved, recurse)

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    def cache_of(self, name: str, step: Step, source=None) -> tuple[_winnow.Cache, Pages]:
        """Its own, or that of the layer with the number `source`."""
        number = step.caches.number(self) if source is None else source
        return step.caches.cache(number, name), step.caches.pages_of(number, name)

    def prepare(
        self, query: dict, x: Tensor, q_c: Tensor, turn: dict, step: Step
    ) -> tuple[Tensor, list[Tensor]]:
        """Attention's queries; the indexer's and their weights, where the layer has an indexer.

        `query` has the arguments of prepare_query() but for `turn`, which is of Step.turn().
        """
        c = self.config
        if not self.has_indexer:
            return _winnow.prepare_query(**query, **turn), []
        index = {
            "q": functional.linear(q_c, self.index_q).view(-1, c.index_heads, INDEX_DIM),
            "weights": functional.linear(x, self.index_w),
            "factor": (c.index_heads * INDEX_DIM) ** -0.5,
            "bf16": step.caches.dtype == "bf16",
            **self.index_rope,
            **turn,
        }
        prepared, *index_queries = _winnow.prepare_queries(query={**query, **turn}, index=index)
        return prepared, index_queries

    def choose(
        self, index_queries: list[Tensor], step: Step, source=None, blocks=None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The indexer's top-k: ids [tokens, topk] int32, ascending, then -1.

        Fewer columns in short contexts. The step's own index keys are stored before; they are those
        of the layer with the number `source`, where it is another. `blocks` goes to score_select().
        """
        keys, pages = self.cache_of("index", step, source)
        return _winnow.score_select(
            *index_queries,
            step.ends(pages.ratio),
            max(1, min(self.config.topk, step.context // pages.ratio)),
            keys=keys,
            block_table=pages.table(),
            requests=step.requests,
            **(blocks or {}),
        )
