"""Random lives of requests over LayerCaches: every step gives what one pass over its tokens gives.

Requests are added, freed, copied and truncated; steps mix chunks, decodes and drafts, some of which
are rejected, and some steps are dropped in the middle, or repeated from there.
"""

import random as python_random

import pytest
import torch

import test_v41
from test_layers import close, layer_of
from winnow.torch import LayerCaches

HIDDEN = 64
EVENTS = 25


# Layers, and how many lives.
STACKS = {
    "mla": (lambda: [layer_of("mla")], 2),
    "v4": (lambda: [layer_of("v4-0"), layer_of("v4-4"), layer_of("v4-128")], 2),
    # Every entry is chosen: what is does not depend on rounding.
    "v4.1": (lambda: test_v41.layers_of(topk=4096, candidates=4096)[:4], 1),
}


class Life:
    """Caches with some requests, and the rows that each request has stored."""

    def __init__(self, layers, seed):
        self.random = python_random.Random(seed)
        torch.manual_seed(seed)
        self.layers = layers
        self.drafts = self.random.choice([0, 1, 4, 8])
        self.dtype = self.random.choice(["bf16", "fp8"])
        page = self.random.choice([1, 3, 16, 64])
        self.caches = LayerCaches(layers, dtype=self.dtype, page=page, drafts=self.drafts)
        self.stored = {}
        self.compared = 0

    def whole(self, rows):
        """What each layer gives for all of them in one pass."""
        caches = LayerCaches(self.layers, dtype=self.dtype)
        step = caches.begin([(caches.add(), len(rows))])
        return [layer(rows, step) for layer in self.layers]

    def add(self):
        request = self.caches.add()
        assert request not in self.stored
        self.stored[request] = torch.empty(0, HIDDEN).bfloat16()

    def free(self):
        self.forget(self.random.choice(list(self.stored)))

    def forget(self, request):
        self.caches.free(request)
        del self.stored[request]

    def go_back(self):
        """copy() and truncate() to a length: where they refuse it, they change nothing."""
        request = self.random.choice(list(self.stored))
        rows = self.stored[request]
        length = self.random.choice(
            [0, self.random.randint(0, len(rows)), max(0, len(rows) - self.random.randint(0, 9))]
        )
        try:
            if self.random.random() < 0.5:
                self.caches.truncate(request, length)
                self.stored[request] = rows[:length]
            else:
                copy = self.caches.copy(request, length)
                self.stored[copy] = rows[:length]
        except ValueError:
            assert self.caches.length(request) == len(rows)

    def step(self):
        chosen = self.random.sample(list(self.stored), self.random.randint(1, len(self.stored)))
        parts = [(r, self.random.choice([0, 1, 1, 2, 5, 17, 64, 130])) for r in chosen]
        new = {request: torch.randn(tokens, HIDDEN).bfloat16() for request, tokens in parts}
        step = self.caches.begin(parts)
        x = torch.cat([new[request] for request in chosen])
        if self.random.random() < 0.2:
            # Something fails behind one of the layers: the step is dropped, or repeated.
            for layer in self.layers[: self.random.randint(1, len(self.layers))]:
                layer(torch.randn_like(x), step)
            if self.random.random() < 0.5:
                return
        y = [layer(x, step) for layer in self.layers]
        self.compare(chosen[0], new[chosen[0]], y)
        accepted = {}
        for request, tokens in parts:
            if self.random.random() < 0.3:
                accepted[request] = max(0, tokens - self.random.randint(0, self.drafts))
        self.caches.commit(step, accepted)
        for request, tokens in parts:
            kept = new[request][: accepted.get(request, tokens)]
            self.stored[request] = torch.cat([self.stored[request], kept])
            assert self.caches.length(request) == len(self.stored[request])

    def compare(self, request, new, y):
        """The step's first part, in every layer; of half the steps, for time's sake."""
        if not len(new) or self.random.random() < 0.5:
            return
        want = self.whole(torch.cat([self.stored[request], new]))
        for got, rows in zip(y, want, strict=True):
            close(got[: len(new)], rows[-len(new) :])
        self.compared += 1


@pytest.mark.parametrize("kind", list(STACKS))
def test_random_lives(kind):
    make, lives = STACKS[kind]
    layers, compared = make(), 0
    for seed in range(lives):
        life = Life(layers, seed)
        life.add()
        for _ in range(EVENTS):
            event = life.random.choice([life.add, life.free, life.go_back] + 5 * [life.step])
            (event if life.stored else life.add)()
        for request in list(life.stored):
            life.caches.free(request)
        assert life.caches.used_bytes() == 0
        compared += life.compared
    assert compared > 2 * lives
