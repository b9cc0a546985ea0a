"""Paged caches and compressor states of all layers, for many requests, and the steps over them.

A step is begin(), every layer once, commit(). docs/layers.md has an example.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from winnow import _winnow
from winnow.torch.paging import Pages
from winnow.torch.rope import RopeTables
from winnow.torch.step import Step, Written

# Names of the formats by record and by the dtype of the caches.
FORMATS = {
    ("v32", "bf16"): "v32_bf16",
    ("v32", "fp8"): "v32_fp8",
    ("v4", "bf16"): "v4_bf16",
    ("v4", "fp8"): "v4_fp8",
    ("index", "bf16"): "index_keys_bf16",
    ("index", "fp8"): "index_keys",
}


@dataclass(frozen=True)
class Records:
    """What a layer keeps for every `ratio` tokens; with a window, for the last tokens only."""

    name: str
    kind: str  # "v32", "v4" or "index"
    ratio: int = 1
    window: int = 0


@dataclass(frozen=True)
class State:
    """Rows [values, scores] of a compressor's latest tokens, in a ring for each request."""

    name: str
    ratio: int
    overlap: bool
    width: int  # floats of a row

    @property
    def reach(self) -> int:
        """Tokens that an entry takes: all but the newest may have to come from the ring."""
        return self.ratio * (2 if self.overlap else 1)

    def first_needed(self, length: int) -> int:
        """The first token that entries behind `length` take."""
        open_window = length // self.ratio * self.ratio
        return max(0, open_window - (self.ratio if self.overlap else 0))


@dataclass
class Request:
    length: int = 0
    written: Written = Written()
    # The last step over it, until commit().
    step: Step | None = None


def _whole(name: str, value) -> int:
    """A number of tokens: 2.0 would count as 2 here and break a table later."""
    try:
        return operator.index(value)
    except TypeError:
        found = type(value).__name__
        raise TypeError(f"caches: {name}: expected an int, found {found}") from None


# What lives from step to step is no inference tensor: later steps may run outside of that mode, and
# write to it.
_makes_lasting_tensors = torch.inference_mode(False)


class LayerCaches:
    """Memory for the records and states that `layers` name in their attribute `stores`.

    Windows and compressor states reach back far enough that `drafts` tokens may be rejected.
    """

    @_makes_lasting_tensors
    def __init__(self, layers: Iterable, *, dtype: str = "fp8", page: int = 64, drafts: int = 8):
        if dtype not in ("fp8", "bf16"):
            raise ValueError(f"caches: dtype: expected fp8 or bf16, found {dtype}")
        page, drafts = _whole("page", page), _whole("drafts", drafts)
        if drafts < 0:
            raise ValueError(f"caches: drafts: expected 0 or more, found {drafts}")
        layers = list(layers)
        if not layers:
            raise ValueError("caches: layers: expected one or more, found none")
        devices = {layer.device for layer in layers}
        if len(devices) != 1:
            raise ValueError(
                f"caches: layers: expected one device, found {sorted(map(str, devices))}"
            )
        self.dtype, self.page, self.drafts = dtype, page, drafts
        (self.device,) = devices
        self.ropes = RopeTables(self.device)
        self.pages: dict[tuple[int, int], Pages] = {}
        self.requests: dict[int, Request] = {}
        self.free_rows: list[int] = []
        self._records: dict[tuple[int, str], tuple[Pages, int]] = {}
        self._states: dict[tuple[int, str], tuple[State, Tensor]] = {}
        # Weak, so that a deep copy of the caches (a prompt's, to be used again) serves them too.
        self._numbers = weakref.WeakKeyDictionary(zip(layers, range(len(layers)), strict=True))
        if len(self._numbers) != len(layers):
            raise ValueError("caches: layers: expected every layer once")
        for layer, number in self._numbers.items():
            for store in layer.stores:
                if isinstance(store, State):
                    shape = (0, store.reach + drafts, store.width)
                    rows = torch.empty(shape, dtype=torch.float32, device=self.device)
                    self._states[number, store.name] = (store, rows)
                    continue
                key = (store.ratio, store.window)
                if key not in self.pages:
                    self.pages[key] = Pages(*key, page, self.device)
                pages = self.pages[key]
                index = pages.add_layer(FORMATS[store.kind, dtype])
                self._records[number, store.name] = (pages, index)
        for pages in self.pages.values():
            # A cache has pages, also before the first entry of a context closes.
            pages.reserve(1)

    @_makes_lasting_tensors
    def __deepcopy__(self, memo: dict) -> LayerCaches:
        """Requests and memory of their own, for the same layers: a prompt's, to be used again."""
        twin = memo[id(self)] = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "caches: LayerCaches is not pickled, since it stands for layers of this process; "
            "copy.deepcopy() copies it, and copy() a request"
        )

    # ---- requests

    @_makes_lasting_tensors
    def add(self) -> int:
        """A new, empty request; the number stands for it."""
        request = self.free_rows[-1] if self.free_rows else len(self.requests)
        # What may find no memory comes first: it leaves the requests as they are.
        for key, (state, rows) in self._states.items():
            if request >= rows.shape[0]:
                bigger = rows.new_empty(max(1, 2 * rows.shape[0]), *rows.shape[1:])
                bigger[: rows.shape[0]] = rows
                self._states[key] = (state, bigger)
        for pages in self.pages.values():
            pages.add_request(request)
        self.requests[request] = Request()
        if self.free_rows:
            self.free_rows.pop()
        return request

    def length(self, request: int) -> int:
        return self._request(request).length

    def _request(self, request: int) -> Request:
        # 0.0 is 0 to a dict, and no row of a table.
        if not hasattr(request, "__index__") or request not in self.requests:
            raise ValueError(f"caches: request: expected one that add() gave, found {request}")
        return self.requests[request]

    def _close_step(self, request: int) -> None:
        """Nobody goes on with a step over a request that changes: its pages may be another's."""
        at = self._request(request)
        if at.step is None:
            return
        at.step.open = False
        for key, kept in at.step.kept_rings(request):
            self._states[key][1][request] = kept
        at.step = None

    def free(self, request: int) -> None:
        self._close_step(request)
        for pages in self.pages.values():
            pages.remove_request(request)
        del self.requests[request]
        self.free_rows.append(request)

    def copy(self, source: int, length: int | None = None) -> int:
        """A new request with the first `length` tokens of `source`, all if not given.

        Pages are shared until one of the two writes to them.
        """
        length = self._request(source).length if length is None else _whole("length", length)
        self.check_resumable(source, length)
        request = self.add()
        for pages in self.pages.values():
            pages.share(source, request, length)
        for _, rows in self._states.values():
            rows[request] = rows[source]
        at = self.requests[source]
        if at.step is not None:
            for key, kept in at.step.kept_rings(source):
                self._states[key][1][request] = kept
        self.requests[request] = Request(length, at.written)
        return request

    def truncate(self, request: int, length: int) -> None:
        """Forgets the tokens from `length` on."""
        length = _whole("length", length)
        self.check_resumable(request, length)
        self._close_step(request)
        self._cut(request, length)

    def _cut(self, request: int, length: int) -> None:
        for pages in self.pages.values():
            pages.truncate(request, length)
        self.requests[request].length = length

    def check_resumable(self, request: int, length: int) -> None:
        """Raises ValueError where copy() or truncate() to `length` would."""
        if not 0 <= length <= self._request(request).length:
            raise ValueError(
                f"caches: length: expected 0 to {self.length(request)} for request {request}, "
                f"found {length}"
            )
        self._check_reachable(request, length, self.requests[request].written)

    def _check_reachable(self, request: int, length: int, written: Written) -> None:
        """A request's past can be resumed at `length` while its window and rings reach there."""
        for pages in self.pages.values():
            first = max(0, length - pages.window + 1) if pages.window else 0
            if first < length and pages.first_kept(request) > first:
                raise ValueError(
                    f"caches: length: the window of request {request} begins at token "
                    f"{pages.first_kept(request)}, {length} would need token {first}"
                )
        for state, rows in self._states.values():
            first, kept = state.first_needed(length), written.first_kept(rows.shape[1])
            if first < min(length, kept):
                raise ValueError(
                    f"caches: length: the compressor's state of request {request} begins at token "
                    f"{kept}, {length} would need token {first}"
                )

    def _after(self, at: Request, tokens: int) -> Written:
        """What a step writes to the rings: the rows of its `tokens`."""
        end = at.length + tokens
        states = self._states.values()
        passed = any(at.written.first_kept(rows.shape[1]) > at.length for _, rows in states)
        if passed and all(state.first_needed(at.length) >= at.length for state, _ in states):
            # Nothing before `length` is needed, and nothing of it is left: rows begin anew.
            return Written(at.length, end)
        return Written(at.written.first, max(at.written.end, end))

    # ---- steps

    @_makes_lasting_tensors
    def begin(self, parts: Iterable[tuple[int, int]]) -> Step:
        """Pages for a batch of (request, new tokens), in the order of the rows of x.

        Prefill chunks, decodes (one token) and drafts (a few) mix. Lengths change in commit().
        """
        try:
            parts = [(request, tokens) for request, tokens in parts]
        except (TypeError, ValueError):
            raise TypeError("caches: parts: expected pairs (request, new tokens)") from None
        parts = [(request, _whole("parts", tokens)) for request, tokens in parts]
        if len({request for request, _ in parts}) != len(parts):
            raise ValueError("caches: parts: expected every request once")
        for request, tokens in parts:
            if tokens < 0:
                raise ValueError(f"caches: parts: expected 0 tokens or more, found {tokens}")
            at = self._request(request)
            self._check_reachable(request, at.length, at.written)
        for pages in self.pages.values():
            missing = [pages.missing(r, self.requests[r].length, n) for r, n in parts]
            pages.reserve(sum(missing))
        for pages in self.pages.values():
            for request, tokens in parts:
                pages.extend(request, self.requests[request].length, tokens)
        ends = [self.requests[request].length + tokens for request, tokens in parts]
        self.ropes.reserve(max(ends, default=1))
        step = Step(self, parts)
        for request, _ in parts:
            self._close_step(request)
            self.requests[request].step = step
        return step

    def start(self, step: Step, layer) -> None:
        """Before `layer` writes to its rings: they must still serve a step that begins anew.

        A ring has room for a token and `drafts` more beside what the next entries take. Of a longer
        part its rows are put aside until the step ends, and back where the layer runs again.
        """
        number = self.number(layer)
        self._mark_rings(step)
        if not step.long:
            return
        for store in layer.stores:
            if isinstance(store, State):
                self._keep_ring(step, (number, store.name))

    def _mark_rings(self, step: Step) -> None:
        if step.started:
            return
        step.started = True
        for request, tokens in step.parts:
            at = self.requests[request]
            step.written[request] = self._after(at, tokens)
            if self._states and at.length and tokens > 1 + self.drafts:
                step.long.append(request)
            else:
                at.written = step.written[request]

    @_makes_lasting_tensors
    def _keep_ring(self, step: Step, key: tuple[int, str]) -> None:
        rows = self._states[key][1]
        if key in step.rings:
            rows[step.long] = step.rings[key]
        else:
            step.rings[key] = rows[step.long]

    def commit(self, step: Step, accepted: dict[int, int] | None = None) -> None:
        """The step's tokens become part of their requests, or the first `accepted` of them."""
        if step.caches is not self or not step.open:
            raise ValueError(
                "caches: step: expected one of begin() that is neither committed nor outdated by a "
                "later begin(), truncate() or free() of one of its requests"
            )
        accepted = {r: _whole("accepted", kept) for r, kept in (accepted or {}).items()}
        tokens = dict(step.parts)
        for request, kept in accepted.items():
            if not 0 <= kept <= tokens.get(request, -1):
                raise ValueError(
                    f"caches: accepted: expected 0 to {tokens.get(request, 0)} tokens of request "
                    f"{request}, found {kept}"
                )
        self._mark_rings(step)
        for request, kept in accepted.items():
            length = self.requests[request].length + kept
            self._check_reachable(request, length, step.written[request])
        step.open = False
        step.rings.clear()
        for request, new in step.parts:
            at = self.requests[request]
            at.step, at.written = None, step.written[request]
            length = at.length + accepted.get(request, new)
            self._cut(request, length)
            for pages in self.pages.values():
                pages.release_before(request, length - self.drafts)

    # ---- what a layer reads and writes

    def number(self, layer) -> int:
        """Its place among the layers of these caches."""
        if layer not in self._numbers:
            raise ValueError("layers: step: expected one of caches that were made for this layer")
        return self._numbers[layer]

    def cache(self, layer: int, name: str) -> _winnow.Cache:
        pages, index = self._records[layer, name]
        return pages.cache(index)

    def pages_of(self, layer: int, name: str) -> Pages:
        return self._records[layer, name][0]

    def state(self, layer: int, name: str) -> Tensor:
        """[requests, ring, width] f32."""
        return self._states[layer, name][1]

    def used_bytes(self) -> int:
        """Bytes of the pages in use and of the states of the requests there are."""
        pages = sum(pages.used_bytes() for pages in self.pages.values())
        rows = sum(4 * rows[0].numel() if len(rows) else 0 for _, rows in self._states.values())
        return pages + rows * len(self.requests)
