"""JAX's arrays, by DLPack: read where they are, results in NumPy; nothing inside jax.jit."""

import ml_dtypes
import numpy as np
import pytest

import winnow

jax = pytest.importorskip("jax")


def on_the_cpu(array):
    return jax.device_put(array, jax.devices("cpu")[0])


def test_arrays():
    g = np.random.default_rng(0)
    q = g.standard_normal((2, 3, 512)).astype(ml_dtypes.bfloat16)
    rows = g.standard_normal((20, 512)).astype(ml_dtypes.bfloat16)
    indices = g.integers(-1, 20, (2, 6), np.int32)
    want = winnow.attend(q, winnow.Cache(rows, "v4_bf16"), indices, scale=0.05)
    q, rows, indices = (on_the_cpu(x) for x in (q, rows, indices))
    got = winnow.attend(q, winnow.Cache(rows, "v4_bf16"), indices, scale=0.05)
    assert isinstance(got, np.ndarray) and got.dtype == ml_dtypes.bfloat16
    assert np.array_equal(got.view(np.uint16), want.view(np.uint16))
    logits = g.random((3, 20), dtype=np.float32)
    assert np.array_equal(winnow.select(on_the_cpu(logits), 4), winnow.select(logits, 4))


def test_arrays_are_not_written():
    logits = on_the_cpu(np.zeros((3, 20), np.float32))
    with pytest.raises(ValueError, match="select: out: expected an array that can be written"):
        winnow.select(logits, out=on_the_cpu(np.zeros((3, 4), np.int32)))
    data = on_the_cpu(np.zeros((1, 64 * 656), np.uint8))
    kv, slots = np.zeros((1, 576), ml_dtypes.bfloat16), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="cache: expected a cache that can be written"):
        winnow.write(kv, slots, winnow.Cache(data, "v32_fp8"))


def test_tracers():
    """Inside jax.jit there is no memory to read: the error says so, and has JAX's as its cause."""
    with pytest.raises(TypeError, match="select: logits: expected an array, found .*Tracer") as e:
        jax.jit(lambda x: winnow.select(x, 4))(np.zeros((3, 20), np.float32))
    assert e.value.__cause__ is not None
    assert "jax" in type(e.value.__cause__).__module__ or "Tracer" in str(e.value.__cause__)
    # The way to call winnow there.
    shape = jax.ShapeDtypeStruct((3, 4), np.int32)

    @jax.jit
    def select(logits):
        return jax.pure_callback(lambda x: winnow.select(np.asarray(x), 4), shape, logits) + 1

    logits = np.random.default_rng(1).random((3, 20), dtype=np.float32)
    assert np.array_equal(select(logits), winnow.select(logits, 4) + 1)
