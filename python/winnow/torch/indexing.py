"""The indexer's choice: the top-k records of each token."""

from __future__ import annotations

from torch import Tensor

from winnow import _winnow
from winnow.torch.caches import Step
from winnow.torch.paging import Pages


def choose(
    queries: Tensor, weights: Tensor, topk: int, keys: _winnow.Cache, pages: Pages, step: Step
) -> Tensor:
    """Ids [tokens, topk] int32, ascending, -1 behind them; fewer columns in short contexts."""
    return _winnow.score_select(
        queries,
        weights,
        step.ends(pages.ratio),
        max(1, min(topk, step.context // pages.ratio)),
        keys=keys,
        block_table=pages.table(),
        requests=step.requests,
    )
