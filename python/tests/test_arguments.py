"""Arguments that do not fit: each is named, before anything is read or written."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch

import winnow
from winnow import flash_mla, hf
from winnow.torch import MlaConfig, Rope, V41Config

INT = torch.int32


@pytest.mark.parametrize(
    "call",
    [
        lambda out: winnow.request_ids([0, 2, 5], out=out),
        lambda out: winnow.prefill_request_ids([0, 2, 5], 1, out=out),
        lambda out: winnow.workspace_starts([1, 1, 1, 1, 1], [(0, 5)], out=out),
    ],
)
def test_host_integers_go_to_host_integers(call):
    """An array of another dtype, rank or stride would be written beyond its end or beside it."""
    good = np.full(5, 7, np.int32)
    assert call(good) is good and (good != 7).all()
    for bad in (
        np.zeros(5, np.uint8),
        np.zeros(5, np.int64),
        np.zeros(5, np.float32),
        np.zeros((5, 5), np.int32),
        np.zeros(10, np.int32)[::2],
        np.zeros(5, np.int32)[::-1],
    ):
        before = bad.copy()
        with pytest.raises(ValueError, match="out: expected contiguous int32 of one dimension"):
            call(bad)
        assert (bad == before).all()


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: winnow.select(x, -3), "select: topk: expected 0 or more, found -3"),
        (lambda x: winnow.Plan(heads=2**32 + 16, pages=4), "Plan: heads: expected an int32"),
        (lambda x: winnow.Plan(page=2**32 + 64, pages=4), "Plan: page: expected an int32"),
        (lambda x: winnow.Plan(device="cuda:one", pages=4), "Plan: device: .* found cuda:one"),
        (lambda x: winnow.Plan(device="cuda:1x", pages=4), "Plan: device: .* found cuda:1x"),
        (lambda x: winnow.Plan(device="cudas", pages=4), "Plan: device: .* found cudas"),
        (lambda x: winnow.c128a_width(2**32), "c128a_width: max_position: expected an int32"),
        (lambda x: winnow.request_ids([0, 1.5]), "query_starts: expected int32 values, found 1.5"),
        (lambda x: winnow.request_ids([0, 2**31]), "query_starts: expected int32 values"),
        (lambda x: winnow.request_ids([0, 2], tokens=-1), "tokens: expected 0 or more"),
        (
            lambda x: winnow.request_ids([0, 2], tokens=1),
            "^request_ids: tokens: expected 2 or more, as query_starts has, found 1$",
        ),
        (lambda x: winnow.workspace_starts([1], None), "chunks: expected a sequence .* None"),
        (lambda x: winnow.workspace_starts([1], [(0, "1")]), r"chunks: .* found \(0, '1'\)"),
        (lambda x: winnow.select(x, 2**70), "select: topk: expected an int64, found 1180591620"),
        (lambda x: winnow.select(x, 2, kernel="\ud800"), "surrogates"),
        (lambda x: winnow.select(x, 2, kernel="simd\0x"), "kernel: expected a str without null"),
        (
            lambda x: winnow.rotate(
                x.bfloat16()[:, None, :1].expand(-1, 1, 64).contiguous(),
                torch.zeros(len(x), dtype=INT),
                torch.zeros(1, 2, 32),
                scales=torch.zeros(len(x), 1, 1),
            ),
            "rotate: scales: expected none without e4m3=True, found an array",
        ),
        (lambda x: winnow.select(x.to("meta"), 2), "logits: .* found one on meta"),
        (lambda x: winnow.select(x.to_sparse(), 2), "logits: .* layout torch.sparse_coo"),
        (lambda x: winnow.select(x.to(torch.complex64).conj().imag, 2), "logits: .* be negated"),
        (lambda x: winnow.select(x, 2, ends=torch.tensor(3, dtype=INT)), "ends: expected 1 to 4"),
        (lambda x: winnow.select(x.numpy().astype(">f4"), 2), "logits: .* found big-endian"),
        (lambda x: winnow.select(np.zeros((1, 4), "V0"), 2), "logits: .* found another dtype"),
    ],
)
def test_values_out_of_range(call, text):
    with pytest.raises(ValueError, match=text):
        call(torch.zeros(1, 4))


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: winnow.select(x, "2"), "select: topk: expected an int, found str"),
        (lambda x: winnow.select(x, 2.0), "select: topk: expected an int, found float"),
        (lambda x: winnow.select(x, 2, relative=np.zeros(2)), "relative: expected a bool, found"),
        (lambda x: winnow.select(x, 2, kernel=3), "select: kernel: expected a str, found int"),
        (lambda x: winnow.select(x, 2, plan=3), "select: plan: expected a winnow.Plan, found int"),
        (
            lambda x: winnow.attend(x, x, x, scale=1.0),
            "attend: cache: expected a winnow.Cache, found Tensor",
        ),
        (lambda x: winnow.attend_mha(x, x, x, scale="x"), "scale: expected a number, found str"),
        (lambda x: winnow.attend_mha(x, x, x, scale=x), "scale: expected a number, found Tensor"),
    ],
)
def test_values_of_another_type(call, text):
    with pytest.raises(TypeError, match=text):
        call(torch.zeros(1, 4))


@pytest.mark.parametrize("wrong", ["no", "", 0, 1, 2.0, [], torch.tensor(True), np.zeros(1, bool)])
def test_a_bool_is_a_bool(wrong):
    """ "no" and a tensor that holds False are true to Python."""
    x = torch.randn(2, 5)
    name = type(wrong).__name__
    with pytest.raises(TypeError, match=f"^select: relative: expected a bool, found .*{name}$"):
        winnow.select(x, 2, relative=wrong)
    with pytest.raises(TypeError, match=f"^Plan: mha: expected a bool, found .*{name}$"):
        winnow.Plan(pages=4, mha=wrong)
    with pytest.raises(TypeError, match=f"config: indexer: expected a bool, found {name}$"):
        MlaConfig(64, 4, 32, 16, 16, 4, 8, 1.0, Rope(1e4), indexer=wrong)
    for flag in ("makes_entries", "chooses", "finds_blocks", "within_blocks"):
        with pytest.raises(TypeError, match=f"config: {flag}: expected a bool, found {name}$"):
            V41Config(64, 4, 32, 0, 8, 1, 8, Rope(1e4), **{flag: wrong})


@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_bools_of_both_kinds(kind):
    x, starts = torch.randn(2, 5), torch.full((2,), 3, dtype=INT)
    for yes in (True, False):
        got = winnow.select(x, 2, starts=starts, relative=kind(yes))
        assert got.tolist() == [[0, 1], [0, 1]] if yes else [[3, 4], [3, 4]]
        assert isinstance(winnow.select(x, 2, values=kind(yes)), tuple) == yes
    MlaConfig(64, 4, 32, 16, 16, 4, 8, 1.0, Rope(1e4), indexer=kind(False))


@pytest.mark.parametrize(
    "data, fmt",
    [
        (torch.zeros(1, 41984, dtype=torch.uint8), "v32_fp8"),
        (torch.zeros(1, 64, 656, dtype=torch.uint8), "v32_fp8"),
        (torch.zeros(1, 576, dtype=torch.bfloat16), "v32_bf16"),
    ],
)
def test_expanded_pages(data, fmt):
    """A stride of 0 is not one that is not given: pages would be read beyond the only one."""
    with pytest.raises(ValueError, match="Cache: data: .* found stride 0"):
        winnow.Cache(data.expand(9, *data.shape[1:]), fmt)


def test_read_only_workspace():
    cache = winnow.Cache(np.zeros((1, 41984), np.uint8), "v32_fp8")
    workspace = np.zeros(1 << 22, np.uint8)
    workspace.flags.writeable = False
    q, indices = np.zeros((1, 16, 576), np.uint16), np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match="workspace: expected an array that can be written"):
        winnow.attend(q, cache, indices, workspace=workspace, scale=1.0)
    assert not workspace.any()


def test_a_cache_keeps_what_it_was_given():
    class Copies:
        def __dlpack__(self, **kwargs):
            copy = np.zeros((1, 41984), np.uint8)
            self.copy = weakref.ref(copy)
            return copy.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return np.zeros(1).__dlpack_device__()

    data = Copies()
    cache = winnow.Cache(data, "v32_fp8")
    assert data.copy() is not None
    del cache
    assert data.copy() is None


def test_tensors_by_attributes():
    """A torch without DLPack's table of functions, and tensors that it cannot carry."""
    members = {"__dlpack_c_exchange_api__": None, "__module__": "torch.older"}
    older = type("Tensor", (torch.Tensor,), members)
    x = torch.rand(3, 9)
    got = winnow.select(x.as_subclass(older), 4)
    assert torch.equal(got, winnow.select(x, 4))
    rows = x.bfloat16()
    code, scale = winnow.quantize(rows.as_subclass(older))
    want = winnow.quantize(rows)
    assert torch.equal(code.view(torch.uint8), want[0].view(torch.uint8)) and scale == want[1]


def test_flash_mla():
    q = torch.randn(2, 3, 4, 576).bfloat16()
    k_cache = torch.randint(0, 100, (5, 8, 1, 656), dtype=torch.uint8)
    indices = torch.randint(0, 40, (2, 3, 7), dtype=INT)

    def call(q=q, k_cache=k_cache, **more):
        return flash_mla.flash_mla_with_kvcache(
            q, k_cache, None, None, 512, is_fp8_kvcache=True, indices=indices, **more
        )

    out, lse = call()
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert torch.equal(call(k_cache=k_cache.view(dtype))[0], out)
    for text, more in {
        r"q: expected \[b, s_q, h, d\]": {"q": q[0]},
        "extra_k_cache: expected with": {"extra_k_cache": k_cache},
        "extra_k_cache: expected with extra": {"extra_indices_in_kvcache": indices},
        "extra_topk_length with both": {"extra_topk_length": torch.ones(2, dtype=INT)},
        r"out: expected \[2, 3, 4, 512\]": {"out": torch.empty(3, 2, 4, 512).transpose(0, 1)},
        r"found \[2, 3, 5, 512\]": {"out": torch.empty(2, 3, 5, 512).bfloat16()},
    }.items():
        with pytest.raises(ValueError, match=text):
            call(**more)
    # No KV at all: every index is outside.
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        q[0], torch.empty(0, 1, 576).bfloat16(), indices[0].unsqueeze(1), 1.0
    )
    assert not out.any() and (lse == torch.inf).all() and (max_logits == -torch.inf).all()


def test_one_mask_for_all_of_a_batch():
    q = torch.randn(2, 3, 5, 16).bfloat16()
    mask = torch.rand(1, 1, 5, 5) < 0.7
    module = torch.nn.Module()
    got = hf.attention(module, q, q, q, mask)[0]
    assert torch.equal(got, hf.attention(module, q, q, q, mask.expand(2, -1, -1, -1))[0])
    # A mask for fewer keys than there are is no mask for them; one for more is cut.
    for kind in (torch.bool, torch.float32):
        short, long = torch.ones(1, 1, 5, 4, dtype=kind), torch.ones(1, 1, 5, 9, dtype=kind)
        with pytest.raises(ValueError, match="attention_mask: expected 5 keys or more"):
            hf.attention(module, q, q, q, short)
        got = hf.attention(module, q, q, q, long)[0]
        assert torch.equal(got, hf.attention(module, q, q, q, long[..., :5])[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: winnow.select(x, 5, out=torch.empty(2, 6, dtype=INT)),
            "select: topk: expected 6, as the array to write to has, found 5",
        ),
        (
            lambda x: winnow.select(x, 5, best=2, best_blocks=torch.empty(2, 3, dtype=INT)),
            "select: best: expected 3, as the array to write to has, found 2",
        ),
        (
            lambda x: winnow.topk_mask(x.int(), 20, out=torch.empty(2, 4, dtype=torch.uint8)),
            "topk_mask: out: expected 3 bytes a row, a bit for each of keys, found 4",
        ),
    ],
)
def test_sizes_agree_with_arrays_to_write_to(call, message):
    with pytest.raises(ValueError) as error:
        call(torch.randn(2, 50))
    assert str(error.value) == message


def test_parts_of_a_step_that_is_forgotten():
    """Weights without a norm and positions without a table would leave the rows as they are."""
    rows, slots, weight = torch.randn(2, 512).bfloat16(), torch.arange(2), torch.ones(512)
    cache = winnow.Cache(torch.zeros(4, 512).bfloat16(), "v4_bf16")
    with pytest.raises(ValueError, match="^write: norm_weight: expected none without norm="):
        winnow.write(rows, slots, cache, norm_weight=weight)
    with pytest.raises(ValueError, match="^write: norm_bias: expected none without norm="):
        winnow.write(rows, slots, cache, norm_bias=weight)
    positions = torch.zeros(2, dtype=INT)
    with pytest.raises(ValueError, match="^write: positions: expected none without a table"):
        winnow.write(rows, slots, cache, positions=positions)
    table = torch.zeros(4, 2, 32)
    with pytest.raises(ValueError, match="^prepare_query: norm_weight: expected none without"):
        winnow.prepare_query(rows[:, None], positions, table, norm_weight=weight)
    assert not cache.data.any()


def test_bools_are_masks_and_nothing_else():
    """A bool is a byte: as codes of e4m3 or as a place for bits it would be taken for one."""
    queries, keys = torch.ones(2, 4, 128), torch.ones(6, 128)
    mask = torch.ones(2, 6, dtype=torch.bool)
    q, k = queries.bfloat16(), keys.bfloat16()[:, None].expand(6, 4, 128)
    assert winnow.attend_mha(q, k, k, scale=0.1, mask=mask).shape == (2, 4, 128)
    calls = {
        "score: q": lambda: winnow.score(
            queries.bool(),
            torch.ones(2, 4),
            torch.ones(2, dtype=INT),
            key_rows=keys.to(torch.float8_e4m3fn),
            key_scales=torch.ones(6),
        ),
        "rotate: positions": lambda: winnow.rotate(q, mask[:, 0], torch.zeros(4, 2, 32)),
        "topk_mask: out": lambda: winnow.topk_mask(mask.int(), 48, out=mask),
        "quantize: out": lambda: winnow.quantize(q, out=torch.empty_like(q, dtype=torch.bool)),
        "Cache: data": lambda: winnow.Cache(torch.zeros(2, 656, dtype=torch.bool), "v32_fp8", 1),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}: expected .*, found bool$"):
            call()


def test_shapes_that_results_depend_on():
    cache = winnow.Cache(torch.zeros(4, 512).bfloat16(), "v4_bf16")
    with pytest.raises(ValueError, match=r"^gather: lengths: expected \[1\] int32, found \[1, 1\]"):
        winnow.gather(cache, torch.zeros(1, 1, dtype=INT), torch.ones(1, 1, dtype=INT))
    with pytest.raises(ValueError, match="^Plan: model: expected v32 or v4, found v5"):
        winnow.Plan(model="v5", pages=4)


def test_masked_arrays():
    """The values under a mask would count."""
    masked = np.ma.masked_array(np.zeros((2, 64), np.uint16), mask=True)
    with pytest.raises(TypeError, match="^norm: x: expected an array .* found MaskedArray"):
        winnow.norm(masked)


def test_caches_name_their_arguments():
    memory = torch.zeros(winnow.cache_shape("v32_fp8", 2), dtype=torch.uint8)
    with pytest.raises(TypeError, match="^Cache: page: expected an int64, found 'all'"):
        winnow.Cache(memory, "v32_fp8", "all")
    with pytest.raises(ValueError, match="^page: expected 1 to 2147483647, found 0"):
        winnow.Cache(memory, "v32_fp8", 0)


@pytest.mark.parametrize("page", [None, 4])
def test_copies_of_a_cache(page):
    """A copy is a view of the same array; a deep copy and an unpickled one have their own."""
    rows = torch.randn(8, 512).bfloat16()
    cache = winnow.Cache(rows if page is None else rows.view(2, 4, 512), "v4_bf16", page)
    same, deep = copy.copy(cache), copy.deepcopy(cache)
    pickled = pickle.loads(pickle.dumps(cache))
    for made in (same, deep, pickled):
        assert repr(made) == repr(cache) and torch.equal(made.data, cache.data)
        assert (made.data.data_ptr() == rows.data_ptr()) == (made is same)
