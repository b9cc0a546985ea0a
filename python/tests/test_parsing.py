"""How arguments are parsed, by hypothesis: any value in any place is served or refused cleanly, and
positions and keywords mean the same."""

import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hostile
import winnow

MADE = {
    name: call
    for name, call in hostile.calls().items()
    if "." not in name and " " not in name and name not in ("Plan", "Cache", "Chunk")
}
EXAMPLES = settings(
    max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)

# Sizes that fit, and sizes that no machine has: what lies between would fill this one.
integers = st.integers(-(2**65), 2**12) | st.integers(2**60, 2**65)


class Index:
    """An integer by its own word."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@st.composite
def arrays(draw):
    """Arrays of PyTorch or NumPy: few elements, any dtype, any rank, strides of views."""
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    dtype = draw(st.sampled_from(["float32", "float64", "int32", "int64", "uint8", "bool"]))
    array = np.full(shape, draw(st.integers(0, 3)), dtype)
    if array.ndim and draw(st.booleans()):
        array = np.moveaxis(array, 0, -1)
    if array.ndim and draw(st.booleans()):
        array = array[..., ::2]
    if draw(st.booleans()):
        return array
    array = torch.from_numpy(array.copy() if 0 in array.strides else array)
    return array.bfloat16() if draw(st.booleans()) else array


scalars = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(),
    integers.map(Index),
    st.integers(-9, 9).map(np.int64),
)
values = st.one_of(
    scalars,
    arrays(),
    st.lists(scalars, max_size=4),
    st.lists(scalars, max_size=4).map(tuple),
    st.dictionaries(st.text(max_size=3), scalars, max_size=2),
    st.sampled_from([object(), Ellipsis, int, winnow.V4, winnow]),
)


def parameters(function) -> list[str]:
    """Names in the order of the signature, the positional ones first, "*" between them."""
    text = re.match(r"\w+\((.*?)\) ->", function.__doc__, re.DOTALL).group(1)
    text = re.sub(r"\[[^]]*\]", "", text)  # commas of types
    return [part.split(":")[0].split("=")[0].strip() for part in text.split(",")]


def fresh(good):
    """A good call's arguments in memory of their own, between guard bytes."""
    guarded = hostile.Guarded()
    return guarded, {k: hostile.copied(v, guarded) for k, v in good.items()}


@EXAMPLES
@given(st.data())
def test_any_value(data):
    name = data.draw(st.sampled_from(sorted(MADE)))
    function, good = MADE[name]
    guarded, keywords = fresh(good)
    every = [p for p in parameters(function) if p != "*"]
    hurt = data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=3, unique=True))
    for argument in hurt:
        keywords[argument] = data.draw(values)
    guarded.remember()
    try:
        function(**keywords)
    except hostile.DOCUMENTED as e:
        assert not guarded.changed(), f"{name} with {hurt}: raised {e!r} and wrote"
        text = "" if isinstance(e, MemoryError) else str(e)
        if "incompatible" not in text:
            assert not [words for words in hostile.NOT_FOR_USERS if words in text], text


@EXAMPLES
@given(st.data())
def test_places_and_names(data):
    """The first arguments may come by position. Unknown, doubled and missing ones are TypeErrors
    that name them."""
    name = data.draw(st.sampled_from(sorted(MADE)))
    function, good = MADE[name]
    order = parameters(function)
    positional = order[: order.index("*")] if "*" in order else order
    leading = [p for p in positional if p in good]
    leading = leading[: next((i for i, p in enumerate(positional) if p not in good), None)]
    count = data.draw(st.integers(0, len(leading)))

    _, keywords = fresh(good)
    function(*[keywords.pop(p) for p in leading[:count]], **keywords)

    _, keywords = fresh(good)
    places = [keywords.pop(p) for p in leading[:count]]
    unknown = data.draw(st.text(min_size=1, max_size=12).filter(lambda n: n not in order))
    with pytest.raises(TypeError):
        function(*places, **keywords, **{unknown: 1})
    if count:
        with pytest.raises(TypeError, match=leading[0]):
            function(*places, **keywords, **{leading[0]: places[0]})
    with pytest.raises(TypeError):
        function(*places, *[None] * (len(positional) - count + 1), **keywords)
