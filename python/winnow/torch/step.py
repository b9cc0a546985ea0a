"""A step: one batch on its way through all layers, and what they share of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from winnow import _winnow
from winnow.torch.paging import Pages
from winnow.torch.rope import Rope

if TYPE_CHECKING:
    from winnow.torch.caches import LayerCaches


@dataclass(frozen=True)
class Written:
    """Positions whose rows were written to a request's rings: each ring still has the last ones."""

    first: int = 0
    end: int = 0

    def first_kept(self, ring: int) -> int:
        """The first position whose row a ring of so many rows still has."""
        return max(self.first, self.end - ring)


class Step:
    """A batch: what all layers need to know of its tokens, computed once."""

    def __init__(self, caches: LayerCaches, parts: list[tuple[int, int]]):
        self.caches, self.parts = caches, parts
        self.open = True  # until commit(), or until one of its requests changes
        # What it writes to the rings of each request, once a layer has started it; the requests
        # that it writes too much for, and what their rings held before.
        self.started = False
        self.written: dict[int, Written] = {}
        self.long: list[int] = []
        self.rings: dict[tuple[int, str], Tensor] = {}
        positions, requests = [], []
        # Whatever device new tensors have by default: these are made on the host.
        host = {"dtype": torch.int32, "device": "cpu"}
        for request, tokens in parts:
            start = caches.requests[request].length
            positions.append(torch.arange(start, start + tokens, **host))
            requests.append(torch.full((tokens,), request, **host))
        empty = torch.empty(0, **host)
        host_positions = torch.cat([empty, *positions])
        self.tokens = len(host_positions)
        self.context = int(host_positions.max()) + 1 if self.tokens else 0
        self.positions = host_positions.to(caches.device)
        self.requests = torch.cat([empty, *requests]).to(caches.device)
        # GLM's layers without an indexer take the slots that the last one with an indexer chose.
        self.chosen: tuple[Tensor, Tensor] | None = None
        # V4.1: the layer whose entries and index keys those after it read, and the blocks of
        # entries that they choose from.
        self.entry_source: int | None = None
        self.blocks: Tensor | None = None
        self._memo: dict = {}

    def kept_rings(self, request: int) -> Iterable[tuple[tuple[int, str], Tensor]]:
        """What a request's rings held before the step, where it writes over what they need."""
        if request in self.long:
            at = self.long.index(request)
            for key, rows in self.rings.items():
                yield key, rows[at]

    def _once(self, key, make):
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def rope(self, rope: Rope) -> Tensor:
        return self.caches.ropes.table(rope)

    def turn(self, rope: Rope) -> dict[str, Tensor]:
        """By what verbs rotate the step's tokens: their arguments `positions` and `table`."""
        return {"positions": self.positions, "table": self.rope(rope)}

    def ends(self, ratio: int) -> Tensor:
        """[tokens] int32: records that a token sees, its own included."""
        return self._once(("ends", ratio), lambda: (self.positions + 1) // ratio)

    def slots(self, pages: Pages) -> Tensor:
        """[tokens] int64: where a token's record goes; -1 where it completes no entry."""
        # With ratio 1 every token completes its entry.
        return self._listed("slots", _winnow.compressed_slots, pages, ratio=pages.ratio)

    def window(self, pages: Pages) -> tuple[Tensor, Tensor]:
        """Slots [tokens, window] of the tokens that each one sees, and how many they are."""
        return self._listed("window", _winnow.window_lists, pages, window=pages.window)

    def every_entry(self, pages: Pages) -> tuple[Tensor, Tensor]:
        """Slots of all entries that each token sees, and how many they are."""
        return self._listed(
            "every",
            _winnow.c128a_lists,
            pages,
            width=_winnow.c128a_width(max(self.context - 1, 0), pages.ratio),
            ratio=pages.ratio,
            decode_tokens=self.tokens,
        )

    def _listed(self, name: str, make, pages: Pages, **options):
        """A list of slots in `pages` for every token, made once for all layers that share them."""

        def listed():
            table, sizes = pages.table(), {"page": pages.page, "pages": pages.count}
            return make(self.positions, self.requests, table, **sizes, **options)

        return self._once((name, pages), listed)

    def locate(self, ids: Tensor, pages: Pages) -> tuple[Tensor, Tensor]:
        """Slots of selected ids, and how many they are."""
        return _winnow.locate(
            ids, self.requests, pages.table(), page=pages.page, pages=pages.count, counts=True
        )
