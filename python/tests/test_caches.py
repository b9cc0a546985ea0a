"""LayerCaches by themselves: copies, numbers of tokens, steps that are dropped."""

import copy
import dataclasses
import pickle

import pytest
import torch

from test_layers import MLA, V4, mla_weights, random, v4_weights
from winnow.torch import LayerCaches, MlaLayer, V4Layer


def test_caches_are_copied_and_not_pickled():
    """A deep copy has requests and memory of its own, for the same layers."""
    layer = MlaLayer(MLA, mla_weights(MLA))
    caches = LayerCaches([layer], dtype="bf16", page=16)
    request, x = caches.add(), random(9, 64).bfloat16()
    step = caches.begin([(request, 8)])
    layer(x[:8], step)
    caches.commit(step)
    with pytest.raises(TypeError, match="^caches: LayerCaches is not pickled, .* copy.deepcopy"):
        pickle.dumps(caches)
    with pytest.raises(TypeError, match="^caches: LayerCaches is not pickled"):
        copy.copy(caches)
    twin = copy.deepcopy(caches)
    results = []
    for one in (twin, caches):
        step = one.begin([(request, 1)])
        results.append(layer(x[8:], step))
        one.commit(step)
    assert torch.equal(*results) and twin.length(request) == caches.length(request) == 9
    twin.free(request)
    assert caches.length(request) == 9


def test_numbers_of_tokens_are_ints():
    caches = LayerCaches([MlaLayer(MLA, mla_weights(MLA))])
    request = caches.add()
    with pytest.raises(TypeError, match="^caches: parts: expected an int, found float"):
        caches.begin([(request, 2.0)])
    step = caches.begin([(request, torch.tensor(3))])
    with pytest.raises(TypeError, match="^caches: accepted: expected an int, found float"):
        caches.commit(step, {request: 2.0})
    caches.commit(step, {request: 2})
    for call in (caches.truncate, caches.copy):
        with pytest.raises(TypeError, match="^caches: length: expected an int, found float"):
            call(request, 1.0)


def test_a_step_that_no_layer_saw_changes_nothing():
    """A scheduler may drop a batch: the compressor's rings still hold the rows behind it."""
    config = dataclasses.replace(V4, ratio=4)
    layer = V4Layer(config, v4_weights(config))
    caches = LayerCaches([layer], dtype="bf16", page=16)
    request, x = caches.add(), random(51, 64).bfloat16()
    step = caches.begin([(request, 50)])
    layer(x[:50], step)
    caches.commit(step)
    twin = copy.deepcopy(caches)
    caches.begin([(request, 130)])
    results = []
    for one in (caches, twin):
        step = one.begin([(request, 1)])
        results.append(layer(x[50:], step))
        one.commit(step)
    assert torch.equal(*results)
    # One that a layer has seen overwrote them.
    layer(random(130, 64).bfloat16(), caches.begin([(request, 130)]))
    with pytest.raises(ValueError, match="^caches: length: the compressor's state of request 0"):
        caches.begin([(request, 1)])
