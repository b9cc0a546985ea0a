"""LayerCaches by themselves: copies, numbers of tokens, steps that are dropped."""

import copy
import pickle

import pytest
import torch

from test_layers import MLA, mla_weights, random, v4_config, v4_weights
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
    for parts in (request, [request], [(request,)], [(request, 1, 1)]):
        with pytest.raises(
            TypeError, match=r"^caches: parts: expected pairs \(request, new tokens"
        ):
            caches.begin(parts)
    step = caches.begin([(request, torch.tensor(3))])
    with pytest.raises(TypeError, match="^caches: accepted: expected an int, found float"):
        caches.commit(step, {request: 2.0})
    caches.commit(step, {request: 2})
    for call in (caches.truncate, caches.copy):
        with pytest.raises(TypeError, match="^caches: length: expected an int, found float"):
            call(request, 1.0)
    with pytest.raises(TypeError, match="^caches: page: expected an int, found float"):
        LayerCaches([MlaLayer(MLA, mla_weights(MLA))], page=64.0)


def test_requests_are_ints():
    """A number that equals a request's is refused before pages are dealt out."""
    layer, x = MlaLayer(MLA, mla_weights(MLA)), random(9, 64).bfloat16()
    caches, request = prefilled(layer, x[:4])
    twin = copy.deepcopy(caches)
    for number in (float(request), "0", None):
        for call in (caches.free, caches.copy, caches.length, lambda r: caches.begin([(r, 60)])):
            with pytest.raises(ValueError, match="^caches: request: expected one that add"):
                call(number)
    assert torch.equal(*[decoded(layer, x[4:], one, request) for one in (caches, twin)])


def v4_layer(ratio):
    config = v4_config(ratio)
    return V4Layer(config, v4_weights(config))


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("tokens", [1, 9, 10, 130])
def test_a_step_that_is_not_committed_changes_nothing(ratio, tokens):
    """A scheduler drops a batch, or a layer fails: the compressor's rings hold what they held."""
    layer, x = v4_layer(ratio), random(55, 64).bfloat16()
    caches, request = prefilled(layer, x[:50])
    twin = copy.deepcopy(caches)
    caches.begin([(request, tokens)])
    assert torch.equal(*[decoded(layer, x[50:51], one, request) for one in (caches, twin)])
    wrong = random(tokens, 64).bfloat16()
    layer(wrong, caches.begin([(request, tokens)]))
    fork = caches.copy(request)
    assert torch.equal(
        decoded(layer, x[51:52], caches, fork),
        decoded(layer, x[51:52], twin, twin.copy(request)),
    )
    assert torch.equal(*[decoded(layer, x[51:53], one, request) for one in (caches, twin)])
    layer(wrong, caches.begin([(request, tokens)]))
    caches.truncate(request, 52)
    twin.truncate(request, 52)
    assert torch.equal(*[decoded(layer, x[52:], one, request) for one in (caches, twin)])


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_layer_runs_again(ratio):
    """Where something fails behind a layer, its step may be taken again from the beginning."""
    layer, x = v4_layer(ratio), random(180, 64).bfloat16()
    caches, request = prefilled(layer, x[:50])
    twin, other = copy.deepcopy(caches), caches.add()
    step = caches.begin([(request, 130), (other, 60)])
    layer(random(190, 64).bfloat16(), step)
    got = layer(torch.cat([x[50:], x[:60]]), step)
    caches.commit(step)
    assert torch.equal(got[:130], decoded(layer, x[50:], twin, request))
    assert torch.equal(*[decoded(layer, x[:7], one, request) for one in (caches, twin)])


def test_a_layer_of_other_caches_leaves_the_step_alone():
    layer, stranger, x = v4_layer(4), v4_layer(4), random(80, 64).bfloat16()
    caches, request = prefilled(layer, x[:50])
    step = caches.begin([(request, 30)])
    with pytest.raises(ValueError, match="^layers: step: expected one of caches"):
        stranger(x[50:], step)
    assert not step.started
