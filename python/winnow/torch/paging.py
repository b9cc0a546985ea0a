"""Pages of records for many requests: block tables, growth, sharing, and the memory itself."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow import _winnow

RELEASED = -1


def _table(requests: int, pages: int) -> Tensor:
    return torch.full((requests, pages), RELEASED, dtype=torch.int32, device="cpu")


class Pages:
    """Records of `ratio` tokens each, in pages that all layers of one kind number alike.

    A request holds a list of pages; a page may be held by several requests (a shared prefix) and is
    copied before one of them writes to it. With a window, pages that no later token can see are
    released.
    """

    def __init__(self, ratio: int, window: int, page: int, device: torch.device):
        self.ratio, self.window, self.page, self.device = ratio, window, page, device
        self.formats: list[str] = []
        self.memory: list[Tensor] = []  # [pages, bytes] uint8 of each layer
        self.holders: list[int] = []  # requests that hold a page
        self.free: list[int] = []
        self.held: dict[int, list[int]] = {}
        self.host_table = _table(1, 1)
        self.device_table: Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.holders)

    def add_layer(self, format: str) -> int:
        """Before the first page exists."""
        self.formats.append(format)
        self.memory.append(self._allocate(format, 0))
        return len(self.formats) - 1

    def _allocate(self, format: str, pages: int) -> Tensor:
        shape = _winnow.cache_shape(format, pages, self.page)
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)

    def cache(self, layer: int) -> _winnow.Cache:
        return _winnow.Cache(self.memory[layer], self.formats[layer], self.page)

    def table(self) -> Tensor:
        """[requests, pages] int32 on the device."""
        if self.device_table is None:
            # A copy on the CPU too: a step keeps the table that it began with.
            self.device_table = self.host_table.to(self.device, copy=True)
        return self.device_table

    # ---- what requests hold

    def add_request(self, request: int) -> None:
        self.held[request] = []
        if request >= self.host_table.shape[0]:
            self._resize_table(2 * request + 1, self.host_table.shape[1])

    def _resize_table(self, rows: int, columns: int) -> None:
        bigger = _table(rows, columns)
        bigger[: self.host_table.shape[0], : self.host_table.shape[1]] = self.host_table
        self.host_table, self.device_table = bigger, None

    def pages_for(self, tokens: int) -> int:
        return -(-(tokens // self.ratio) // self.page)

    def _writes_to_shared(self, request: int, length: int) -> bool:
        """Whether the next record goes into a page that another request holds as well."""
        record = length // self.ratio
        at, inside = divmod(record, self.page)
        held = self.held[request]
        return inside > 0 and at < len(held) and self.holders[held[at]] > 1

    def missing(self, request: int, length: int, tokens: int) -> int:
        """New pages that a step of `tokens` after `length` needs."""
        new = max(0, self.pages_for(length + tokens) - len(self.held[request]))
        return new + self._writes_to_shared(request, length)

    def reserve(self, pages: int) -> None:
        """Makes `pages` free ones, in memory that at least doubles when it grows."""
        if pages <= len(self.free):
            return
        before = self.count
        total = max(2 * before, before + pages - len(self.free))
        bigger = [self._allocate(format, total) for format in self.formats]
        for new, old in zip(bigger, self.memory, strict=True):
            new[:before] = old
        self.memory = bigger
        self.holders += [0] * (total - before)
        # Pages are taken from the end of the list: low numbers first.
        self.free = list(range(total - 1, before - 1, -1)) + self.free

    def _take(self) -> int:
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def _drop(self, page: int) -> None:
        if page == RELEASED:
            return
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self.free.append(page)

    def _set(self, request: int, at: int, page: int) -> None:
        if at >= self.host_table.shape[1]:
            self._resize_table(self.host_table.shape[0], 2 * at + 1)
        self.host_table[request, at] = page
        self.device_table = None

    def extend(self, request: int, length: int, tokens: int) -> None:
        """After reserve(): pages for tokens [length, length + tokens), none of them shared."""
        held = self.held[request]
        if self._writes_to_shared(request, length):
            at = length // self.ratio // self.page
            copy = self._take()
            for memory in self.memory:
                memory[copy] = memory[held[at]]
            self._drop(held[at])
            held[at] = copy
            self._set(request, at, copy)
        while len(held) < self.pages_for(length + tokens):
            held.append(self._take())
            self._set(request, len(held) - 1, held[-1])

    def release_before(self, request: int, length: int) -> None:
        """With a window: the pages that tokens from `length` on cannot see."""
        if not self.window:
            return
        for at in range(max(0, length - self.window + 1) // self.page):
            if self.held[request][at] != RELEASED:
                self._drop(self.held[request][at])
                self.held[request][at] = RELEASED
                self._set(request, at, RELEASED)

    def first_kept(self, request: int) -> int:
        """The first token whose record has not been released."""
        held = self.held[request]
        return next((i for i, page in enumerate(held) if page != RELEASED), len(held)) * self.page

    def truncate(self, request: int, length: int) -> None:
        held = self.held[request]
        while len(held) > self.pages_for(length):
            self._drop(held.pop())
            self._set(request, len(held), RELEASED)

    def remove_request(self, request: int) -> None:
        self.truncate(request, 0)
        del self.held[request]

    def share(self, source: int, target: int, length: int) -> None:
        """`target` holds the pages of the first `length` tokens of `source` as well."""
        for page in self.held[source][: self.pages_for(length)]:
            if page != RELEASED:
                self.holders[page] += 1
            self.held[target].append(page)
            self._set(target, len(self.held[target]) - 1, page)

    def used_bytes(self) -> int:
        """Bytes of the pages that requests hold, in all layers."""
        used = self.count - len(self.free)
        return sum(used * memory.shape[1] for memory in self.memory)
