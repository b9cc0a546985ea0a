"""LayerCaches by themselves: copies, numbers of tokens, steps that are dropped."""

import copy
import dataclasses
import pickle

import pytest
import torch

from test_layers import MLA, V4, mla_weights, random, v4_weights
from winnow.torch import LayerCaches, MlaLayer, V4Layer


def decoded(layer, x, caches, request):
    step = caches.begin([(request, len(x))])
    y = layer(x, step)
    caches.commit(step)
    return y


def prefilled(layer, x):
    """Caches with a request of the tokens x."""
    caches = LayerCaches([layer], dtype="bf16", page=16)
    request = caches.add()
    decoded(layer, x, caches, request)
    return caches, request


def test_caches_are_copied_and_not_pickled():
    """A deep copy has requests and memory of its own, for the same layers."""
    layer, x = MlaLayer(MLA, mla_weights(MLA)), random(9, 64).bfloat16()
    caches, request = prefilled(layer, x[:8])
    with pytest.raises(TypeError, match="^caches: LayerCaches is not pickled, .* copy.deepcopy"):
        pickle.dumps(caches)
    with pytest.raises(TypeError, match="^caches: LayerCaches is not pickled"):
        copy.copy(caches)
    twin = copy.deepcopy(caches)
    assert torch.equal(*[decoded(layer, x[8:], one, request) for one in (twin, caches)])
    assert twin.length(request) == caches.length(request) == 9
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
    layer, x = V4Layer(config, v4_weights(config)), random(51, 64).bfloat16()
    caches, request = prefilled(layer, x[:50])
    twin = copy.deepcopy(caches)
    caches.begin([(request, 130)])
    assert torch.equal(*[decoded(layer, x[50:], one, request) for one in (caches, twin)])
    # One that a layer has seen overwrote them.
    layer(random(130, 64).bfloat16(), caches.begin([(request, 130)]))
    with pytest.raises(ValueError, match="^caches: length: the compressor's state of request 0"):
        caches.begin([(request, 1)])
