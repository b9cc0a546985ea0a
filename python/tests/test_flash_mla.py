"""FlashMLA-shaped calls against the golden vectors, which public Hopper kernels computed."""

import inspect

import pytest
import torch

import reference
import winnow
import winnow.flash_mla as flash_mla
from conftest import DECODE_LSE, DECODE_OUT, GOLDEN, PREFILL_LSE, PREFILL_OUT, on

safetensors = pytest.importorskip("safetensors")

DECODE = sorted(p.stem for p in GOLDEN.glob("decode_*"))
PREFILL = sorted(p.stem for p in GOLDEN.glob("prefill_*"))


class Golden:
    def __init__(self, name, device):
        with safetensors.safe_open(str(GOLDEN / f"{name}.safetensors"), "pt") as f:
            self.tensors = {k: f.get_tensor(k).clone().to(device) for k in f.keys()}
            self.meta = f.metadata()
        self.scale = float(self.meta["softmax_scale"])

    def get(self, name):
        return self.tensors.get(name)

    def __getitem__(self, name):
        return self.tensors[name]

    def cache(self, prefix=""):
        """[pages, page, 1, bytes per token] with padding behind each page, as engines have it."""
        if f"{prefix}cache" not in self.tensors:
            return None
        stored = self[f"{prefix}cache"]
        page = int(float(self.meta[f"{prefix}block_size"]))
        padded = torch.full((stored.shape[0], stored.shape[1] + 1152), 0xFF, dtype=torch.uint8)
        padded = padded.to(stored.device)[:, : stored.shape[1]]
        padded.copy_(stored)
        return padded.view(stored.shape[0], page, 1, -1)

    def magnitude(self):
        """sum_j p_j |v_j| of every output, in fp64."""
        lists = []
        if "cache" in self.tensors:
            fmt = "v32_fp8" if self["q"].shape[-1] == 576 else "v4_fp8"
            for prefix in ("", "extra_"):
                if f"{prefix}cache" in self.tensors:
                    page = int(float(self.meta[f"{prefix}block_size"]))
                    rows = reference.records(self[f"{prefix}cache"], fmt, page)
                    indices = self[f"{prefix}indices_physical"].flatten(0, 1)
                    lists.append((rows, indices, self.get(f"{prefix}topk_length")))
        else:
            lists.append((self["kv"], self["indices"], self.get("topk_length")))
        q = self["q"].flatten(0, -3)
        got = reference.attend(q, lists, self.scale, self.get("attn_sink"))[3]
        return got.view(self["out"].shape)

    def decode(self, **changes):
        arguments = {
            "q": self["q"],
            "k_cache": self.cache().view(torch.float8_e4m3fn),
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": 512,
            "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
            "softmax_scale": self.scale,
            "is_fp8_kvcache": True,
            "indices": self["indices_physical"],
            "attn_sink": self.get("attn_sink"),
            "extra_k_cache": self.cache("extra_"),
            "extra_indices_in_kvcache": self.get("extra_indices_physical"),
            "topk_length": self.get("topk_length"),
            "extra_topk_length": self.get("extra_topk_length"),
        }
        return flash_mla.flash_mla_with_kvcache(**{**arguments, **changes})


def strided(x):
    """The same values behind other strides: a gap in the middle dimensions."""
    wide = x.new_empty(*x.shape[:-2], x.shape[-2] + 3, x.shape[-1])
    wide[..., : x.shape[-2], :] = x
    return wide[..., : x.shape[-2], :]


def test_there_are_six_files():
    assert len(DECODE) + len(PREFILL) == 6


@on("attend")
@pytest.mark.parametrize("name", DECODE)
def test_decode(name, device):
    g = Golden(name, device)
    out, lse = g.decode()
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert lse.shape == (g["q"].shape[0], g["q"].shape[2], g["q"].shape[1])
    DECODE_OUT.check(out, g["out"], g.magnitude())
    DECODE_LSE.check(lse, g["lse"])


@on("attend")
@pytest.mark.parametrize("name", DECODE)
def test_decode_strided_and_out(name, device):
    g = Golden(name, device)
    want, want_lse = g.decode()
    b, s_q, heads, _ = want.shape
    out = torch.full((b, s_q + 1, heads, 512), 7.0, dtype=torch.bfloat16, device=device)
    got, lse = g.decode(q=strided(g["q"]), indices=strided(g["indices_physical"]), out=out[:, :s_q])
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(got, want) and torch.equal(lse, want_lse)
    assert (out[:, s_q] == 7).all(), "rows of out that are not the call's"


@on("attend")
@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name, device):
    g = Golden(name, device)
    kv = g["kv"].view(g["kv"].shape[0], 1, -1)
    indices = g["indices"].view(g["indices"].shape[0], 1, -1)
    length, sink = g.get("topk_length"), g.get("attn_sink")
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        g["q"], kv, indices, g.scale, attn_sink=sink, topk_length=length
    )
    PREFILL_OUT.check(out, g["out"], g.magnitude())
    PREFILL_LSE.check(max_logits, g["max_logits"])
    PREFILL_LSE.check(lse, g["lse"])
    mine = torch.empty_like(out)
    got = flash_mla.flash_mla_sparse_fwd(
        g["q"], strided(kv), indices, g.scale, 512, sink, length, mine
    )
    assert got[0].data_ptr() == mine.data_ptr()
    assert torch.equal(mine, out) and torch.equal(got[2], lse)


def test_names_and_order():
    decode = list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters)
    assert (
        decode
        == (
            "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
            "softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache "
            "extra_indices_in_kvcache topk_length extra_topk_length out"
        ).split()
    )
    prefill = list(inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters)
    assert prefill == "q kv indices sm_scale d_v attn_sink topk_length out".split()
    assert flash_mla.get_mla_metadata(torch.zeros(1), 128, 1, topk=2048)[1] is None


@on("attend", "write")
def test_odd_sizes(device):
    """5 heads, 7 indices, 3 query tokens, pages of 3: what the Hopper kernels refuse."""
    g = torch.Generator().manual_seed(3)
    kv = torch.randn(12, 576, generator=g).bfloat16().to(device)
    memory = torch.zeros(winnow.cache_shape("v32_fp8", 4, 3), dtype=torch.uint8, device=device)
    cache = winnow.Cache(memory, "v32_fp8", 3)
    winnow.write(kv, torch.arange(12, device=device), cache, scale="pow2")
    q = torch.randn(2, 3, 5, 576, generator=g).bfloat16().to(device)
    indices = torch.randint(-1, 12, (2, 3, 7), generator=g, dtype=torch.int32).to(device)
    length = torch.tensor([7, 4], dtype=torch.int32, device=device)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q,
        memory.view(4, 3, 1, 656),
        None,
        None,
        512,
        indices=indices,
        topk_length=length,
        is_fp8_kvcache=True,
    )
    lengths = length.repeat_interleave(3)
    want, want_lse = winnow.attend(
        q.flatten(0, 1), cache, indices.flatten(0, 1), lengths=lengths, lse=True, scale=576**-0.5
    )
    assert torch.equal(out.flatten(0, 1), want)
    assert torch.equal(lse, want_lse.view(2, 3, 5).transpose(1, 2))


def test_dense_calls_say_no():
    q = torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16)
    cache = torch.zeros(1, 64, 1, 576, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="dense attention"):
        flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func is dense"):
        flash_mla.flash_attn_varlen_func(q, q, q)
    indices = torch.zeros(1, 1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="causal"):
        flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, causal=True, indices=indices)
    with pytest.raises(NotImplementedError, match="512 dimensions, not 128"):
        flash_mla.flash_mla_with_kvcache(q, cache, None, None, 128, indices=indices)
    with pytest.raises(ValueError, match=r"indices: expected \[1, 1, topk\]"):
        flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, indices=indices[0])


def test_metadata():
    """What callers of FlashMLA read before the first call: nothing is there yet."""
    schedule, splits = flash_mla.get_mla_metadata(None, 1, 1)
    assert splits is None and not schedule.have_initialized
    assert schedule.tile_scheduler_metadata is None and schedule.num_splits is None
    assert schedule.config is None
