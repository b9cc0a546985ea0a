"""transformers' Cache over winnow's paged caches: a request for each row of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from winnow.torch import LayerCaches, Step


@dataclass
class Pass:
    """A forward pass of the model: what its attention layers share."""

    cache: PagedCache
    step: Step
    columns: Tensor  # [rows, new columns] bool on the CPU: which of them are tokens
    kept: Tensor | None  # rows of x that are tokens; None where all of them are
    first_positions: Tensor | None  # [rows]: see PagedCache


class PagedCache(Cache):
    """What a converted model keeps of its past.

    Columns count as transformers counts them, padding included; a request holds the tokens of its
    row that attention_mask leaves, so that a padded row computes what it would alone.
    """

    def __init__(self, caches: LayerCaches, layers: int, croppable: bool):
        super().__init__(layers=[])
        self.caches, self.layer_count, self.croppable = caches, layers, croppable
        self.rows: list[int] = []  # the request of each row
        self.mask: Tensor | None = None  # [rows, columns] bool on the CPU: which columns are tokens
        # [rows]: what position_ids called the first token of each row; None where nobody said.
        self.first_positions: Tensor | None = None

    # ---- a forward pass

    def begin(self, rows: int, columns: int, mask: Tensor | None, positions: Tensor | None) -> Pass:
        """A pass over `columns` new columns; `mask` covers these, or the past as well."""
        past = self.get_seq_length()
        if self.mask is None:
            self.reset()  # requests of a first pass that failed
        if past and not columns:
            # generate() cuts off as many columns as the cache holds.
            raise ValueError(
                f"winnow.hf: input_ids: expected the whole conversation, more than the {past} "
                "columns that the cache holds, found none behind them"
            )
        if self.rows and len(self.rows) != rows:
            raise ValueError(
                f"winnow.hf: past_key_values: it holds {len(self.rows)} rows, the batch has {rows}"
            )
        new = self._new_columns(rows, past, columns, mask)
        first_positions = self._follow(positions, new)
        if not self.rows:
            self.rows = [self.caches.add() for _ in range(rows)]
        counts = new.sum(1).tolist()
        step = self.caches.begin(zip(self.rows, counts, strict=True))
        kept = None
        if not bool(new.all()):
            kept = new.flatten().nonzero()[:, 0].to(step.positions.device)
        return Pass(self, step, new, kept, first_positions)

    def commit(self, done: Pass) -> None:
        self.caches.commit(done.step)
        new = done.columns
        self.mask = new if self.mask is None else torch.cat([self.mask, new], 1)
        self.first_positions = done.first_positions

    def _new_columns(self, rows: int, past: int, columns: int, mask: Tensor | None) -> Tensor:
        if mask is None:
            return torch.ones(rows, columns, dtype=torch.bool, device="cpu")
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise NotImplementedError(
                "winnow.hf: attention_mask: expected [rows, columns], what tokens there are, found "
                f"{found}"
            )
        mask = mask.detach().cpu()
        given = mask[:, -columns:] if columns else mask[:, :0]
        if not bool(((given == 0) | (given == 1)).all()):
            # What is added to scores has 0 for a token, and would count as padding.
            raise ValueError(
                "winnow.hf: attention_mask: expected 1 for a token and 0 for padding, found other "
                "values"
            )
        mask = mask.bool()
        if list(mask.shape) == [rows, columns]:
            return mask
        if list(mask.shape) != [rows, past + columns]:
            raise ValueError(
                f"winnow.hf: attention_mask: expected [{rows}, {past + columns}], found "
                f"{list(mask.shape)}"
            )
        if past and not torch.equal(mask[:, :past], self.mask):
            raise NotImplementedError(
                "winnow.hf: attention_mask: it must keep what it said of earlier columns: what a "
                "cache has stored cannot be masked later (where none is given, generate() masks "
                "pad tokens, those that it made itself too: give one)"
            )
        return mask[:, past:]

    def _follow(self, positions: Tensor | None, new: Tensor) -> Tensor | None:
        """Tokens of a row follow each other; where the first one stands does not change attention.

        Gives what the cache is to keep of the rows' first positions.
        """
        if positions is None:
            begins = self.mask is None and bool(new.all())
            zeros = torch.zeros(new.shape[0], dtype=torch.long, device=new.device)
            return zeros if begins else self.first_positions
        if positions.dim() == 1:
            positions = positions[None]
        if positions.dim() != 2 or list(positions.shape) not in ([1, new.shape[1]], [*new.shape]):
            raise ValueError(
                f"winnow.hf: position_ids: expected {list(new.shape)}, found "
                f"{list(positions.shape)}"
            )
        if not new.numel():
            return self.first_positions
        lengths = [self.caches.length(request) for request in self.rows] or [0]
        lengths = torch.tensor(lengths, device=new.device)
        firsts = positions.detach().cpu() - lengths[:, None] - new.cumsum(1) + 1
        first = firsts.gather(1, new.int().argmax(1, keepdim=True))[:, 0]
        if self.first_positions is not None:
            first = torch.where((lengths > 0) | ~new.any(1), self.first_positions, first)
        if bool(((firsts != first[:, None]) & new).any()):
            raise NotImplementedError(
                "winnow.hf: position_ids: expected positions that follow each other, and those of "
                "the past, in every row (a prompt repeats the "
                f"{self.get_seq_length()} columns that the cache holds; packed sequences are not "
                "served, nor generate() behind padding on the right)"
            )
        return first

    # ---- what transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.mask is None else self.mask.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def __len__(self) -> int:
        return self.layer_count

    def __repr__(self) -> str:
        return f"PagedCache(rows={len(self.rows)}, columns={self.get_seq_length()})"

    @property
    def batch_size(self) -> int:
        return len(self.rows) or -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.mask is not None

    @property
    def is_croppable(self) -> bool:
        return self.croppable

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.layer_count

    def reset(self) -> None:
        for request in self.rows:
            self.caches.free(request)
        self.rows, self.mask, self.first_positions = [], None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last columns (a negative number of them), where windows and states reach."""
        if tokens_to_remove > 0:
            raise ValueError(
                "winnow.hf: crop: expected 0 or a negative number of columns, found "
                f"{tokens_to_remove}"
            )
        if tokens_to_remove == 0 or self.mask is None:
            return
        removed = self.mask[:, tokens_to_remove:].sum(1).tolist()
        lengths = [self.caches.length(r) - n for r, n in zip(self.rows, removed, strict=True)]
        try:
            for request, length in zip(self.rows, lengths, strict=True):
                self.caches.check_resumable(request, length)
        except ValueError as error:
            raise NotImplementedError(f"winnow.hf: crop: {error}") from error
        for request, length in zip(self.rows, lengths, strict=True):
            self.caches.truncate(request, length)
        self.mask = self.mask[:, :tokens_to_remove]

    def used_bytes(self) -> int:
        """Bytes of the pages in use and of the compressors' states."""
        return self.caches.used_bytes()

    def _refuse(self, what: str):
        raise NotImplementedError(f"winnow.hf: {what}: converted models do not serve it")

    def reorder_cache(self, beam_idx) -> None:
        self._refuse("beam search (reorder_cache)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("batch_repeat_interleave")

    def batch_select_indices(self, indices) -> None:
        self._refuse("batch_select_indices")

    def update(self, *args, **kwargs):
        self._refuse("update by an attention layer that is not converted")

    def update_indexer(self, *args, **kwargs):
        self._refuse("update_indexer by an attention layer that is not converted")
