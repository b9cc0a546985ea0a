"""winnow's V4 attention in vLLM's layer for a Hopper GPU, against vLLM's own method of that layer,
with the metadata of vLLM's builders; and V4's indexer."""

import dataclasses
import importlib
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import common_metadata, i32
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import winnow

V4, SWA = "vllm.models.deepseek_v4", "vllm.v1.attention.backends.mla.sparse_swa"
HEADS, WINDOW, TOPK, TOKENS, LENGTH = 6, 128, 64, 128, 640
RATIOS = [1, 4, 128]
# Two decodes, a decode with two drafts, a prompt and a chunk of one.
QUERY, SEQUENCE = [1, 1, 3, 5, 40], [400, 3, 131, 5, 300]
WINDOW_PAGE, BLOCK, BLOCKS = 64, 256, 40
# V4's caches as vLLM describes them, which gained a field in 0.28.
FIELDS = {field.name for field in dataclasses.fields(MLAAttentionSpec)}
RECORDS = {
    "num_kv_heads": 1,
    "head_size": 512,
    "dtype": torch.uint8,
    "cache_dtype_str": "fp8_ds_mla",
    "alignment": 576,
    "model_version": "deepseek_v4",
    **({"state_content_bytes": 584} if "state_content_bytes" in FIELDS else {}),
}
NAMES = {"window": "layer.swa_cache", "states": "layer", "keys": "layer.indexer.k_cache"}


@pytest.fixture
def config():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def seen(config):
    """What vLLM's builders read of a configuration."""
    hf_config = SimpleNamespace(sliding_window=WINDOW, compress_ratios=RATIOS, index_topk=TOPK)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, max_model_len=LENGTH),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS, max_num_seqs=8),
        parallel_config=config.parallel_config,
        speculative_config=None,
    )


@pytest.fixture
def flashmla(monkeypatch):
    from vllm.models.deepseek_v4.common.ops import cache_utils
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    # vLLM has some kernels twice; these need a GPU.
    monkeypatch.setattr(cache_utils, "has_cutedsl", lambda: False)
    init_workspace_manager(torch.device("cpu"))
    yield importlib.import_module(f"{V4}.nvidia.flashmla")
    reset_workspace_manager()


def commons():
    """The batch by pages of the window and by blocks of 256 tokens."""
    rng = np.random.default_rng(0)
    return (common_metadata(rng, QUERY, SEQUENCE, page, BLOCKS) for page in (WINDOW_PAGE, BLOCK))


def spec(ratio):
    name = "tokens_per_state" if "tokens_per_state" in FIELDS else "compress_ratio"
    return MLAAttentionSpec(block_size=BLOCK, **{name: ratio}, **RECORDS)


def metadata(flashmla, seen, ratio):
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadataBuilder
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    window_spec = SlidingWindowMLASpec(block_size=WINDOW_PAGE, sliding_window=WINDOW, **RECORDS)
    device = torch.device("cpu")
    window, states = commons()
    builder = getattr(flashmla, "DeepseekSparseSWAFlashMLAMetadataBuilder", None)
    if builder is None:
        builder = importlib.import_module(SWA).DeepseekSparseSWAMetadataBuilder
    name = NAMES["window"]
    built = {name: builder(window_spec, [name], seen, device).build(0, window)}
    if ratio > 1:
        builder = DeepseekV4FlashMLAMetadataBuilder(spec(ratio), [NAMES["states"]], seen, device)
        built[NAMES["states"]] = builder.build(0, states)
    return built, window.positions


def cache(page, generator):
    """Pages of random records, with a gap between them as vLLM's alignment leaves it."""
    width = page * 584 + 40
    data = torch.zeros(BLOCKS, width, dtype=torch.uint8)
    pages = data.as_strided((BLOCKS, page, 584), (width, 584, 1))
    rows = torch.randn(BLOCKS * page, 512, generator=generator).bfloat16()
    flat = data.as_strided((BLOCKS, page * 584), (width, 1))
    winnow.write(rows, torch.arange(len(rows)), winnow.Cache(flat, "v4_fp8", page))
    return pages


def choice(positions, ratio, generator):
    """An indexer's choice among each token's states, in a buffer that is longer than the batch."""
    ids = torch.full((TOKENS, TOPK), -1, dtype=torch.int32)
    for token, position in enumerate(positions.tolist()):
        states = (position + 1) // ratio
        count = min(states, TOPK)
        ids[token, :count] = torch.randperm(states, generator=generator)[:count].sort()[0].int()
    return ids


def layer_of(flashmla, ratio, positions, generator):
    """vLLM's layer as far as its attention reads it, without the projections around that."""
    layer = object.__new__(flashmla.DeepseekV4FlashMLAAttention)
    torch.nn.Module.__init__(layer)
    padded = layer.get_padded_num_q_heads(HEADS)
    sink = torch.full((padded,), -float("inf"))
    sink[:HEADS] = torch.randn(HEADS, generator=generator)
    for name, value in {
        "prefix": NAMES["states"],
        "compress_ratio": ratio,
        "window_size": WINDOW,
        "scale": 512**-0.5,
        "attn_sink": sink,
        "n_local_heads": HEADS,
        "padded_heads": padded,
        "max_model_len": LENGTH,
        "max_num_batched_tokens": TOKENS,
        "max_image_tokens": 0,
        "eager_scratch_pool": None,
        "topk_indices_buffer": choice(positions, 4, generator),
        "swa_cache_layer": SimpleNamespace(
            prefix=NAMES["window"], kv_cache=cache(WINDOW_PAGE, generator)
        ),
        "kv_cache": cache(BLOCK // ratio, generator) if ratio > 1 else torch.tensor([]),
        "by_winnow": True,
    }.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize("ratio", RATIOS)
@torch.inference_mode()
def test_forward(plugin, config, seen, flashmla, ratio, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    built, positions = metadata(flashmla, seen, ratio)
    layer = layer_of(flashmla, ratio, positions, generator)
    tokens = len(positions)
    q = torch.zeros(tokens + 4, layer.padded_heads, 512).bfloat16()
    q[:, :HEADS] = torch.randn(tokens + 4, HEADS, 512, generator=generator).bfloat16()
    # Four tokens that pad the batch of a CUDA graph.
    positions = torch.cat([positions, torch.zeros(4, dtype=torch.int64)])
    theirs, ours = (torch.full_like(q, 7.0) for _ in range(2))
    with set_forward_context(built, config, num_tokens=tokens):
        layer.forward_mqa(q, None, positions, theirs)
    assert plugin.register()
    called = []
    attend = winnow.attend
    monkeypatch.setattr(winnow, "attend", lambda *a, **k: called.append(1) or attend(*a, **k))
    with set_forward_context(built, config, num_tokens=tokens):
        layer.forward_mqa(q, None, positions, ours)
    assert called == [1]
    live, want = ours[:tokens, :HEADS].float(), theirs[:tokens, :HEADS].float()
    # Both round weights and results to bf16.
    bound = 2**-7 * want.abs().amax(-1, keepdim=True)
    assert ((live - want).abs() <= bound).all()
    assert (ours[tokens:] == 7).all() and (ours[:, HEADS:] == 7).all()


def test_profiling_takes_no_memory(plugin, config, seen, flashmla):
    from vllm.v1.worker.workspace import current_workspace_manager

    generator = torch.Generator().manual_seed(1)
    layer = layer_of(flashmla, 4, torch.arange(3), generator)
    assert plugin.register()
    out = torch.ones(3, layer.padded_heads, 512, dtype=torch.bfloat16)
    with set_forward_context(None, config, num_tokens=3):
        layer.forward_mqa(out.clone(), None, torch.arange(3), out)
    assert not out.any()
    assert all(w is None for w in current_workspace_manager()._current_workspaces)


def test_refused(config):
    from winnow.engines.vllm import v4

    layer = SimpleNamespace(max_image_tokens=0, kv_cache_torch_dtype=torch.uint8)
    assert v4.refused(layer) == ""
    layer.max_image_tokens = 384
    assert v4.refused(layer) == "winnow's windows have no image spans"
    layer.max_image_tokens, layer.kv_cache_torch_dtype = 0, torch.bfloat16
    assert v4.refused(layer) == "winnow reads V4's fp8 records, not torch.bfloat16"


def test_drafts_that_see_ahead(plugin, config, seen, flashmla):
    """DSpark's lists are wider than the window: vLLM's method serves them."""
    built, positions = metadata(flashmla, seen, 1)
    layer = layer_of(flashmla, 1, positions, torch.Generator().manual_seed(1))
    assert plugin.register()
    window = built[NAMES["window"]]
    if hasattr(window, "decode_swa_width"):
        window.decode_swa_width = WINDOW + 64
    else:
        window.decode_swa_indices = torch.nn.functional.pad(window.decode_swa_indices, (0, 64))
    q = torch.zeros(len(positions), layer.padded_heads, 512, dtype=torch.bfloat16)
    with set_forward_context(built, config, num_tokens=len(positions)):
        layer.forward_mqa(q, None, positions, torch.empty_like(q))
        assert "made_by_winnow" not in vars(get_forward_context())


@torch.inference_mode()
def test_indexer(plugin, config, seen):
    """Slots of compressed states as vLLM has them, and the top-k among them."""
    from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping

    from winnow.engines.vllm import indexer
    from winnow.engines.vllm.sparse_mla import planar_pages

    assert plugin.register()
    attention = importlib.import_module(f"{V4}.attention")
    layer = attention.DeepseekV4IndexerCache(
        head_dim=132,
        dtype=torch.uint8,
        prefix=NAMES["keys"],
        cache_config=config.cache_config,
        compress_ratio=4,
    )
    backend = layer.get_attn_backend()
    assert backend is indexer.WinnowV4IndexerBackend
    _, common = commons()
    built = backend.get_builder_cls()(spec(4), [NAMES["keys"]], seen, torch.device("cpu")).build(
        0, common
    )
    tokens = common.num_actual_tokens
    values = {
        "num_tokens": tokens,
        "slot_mapping": common.slot_mapping,
        "query_start_loc": common.query_start_loc,
        "seq_lens": common.seq_lens,
        "block_table": common.block_table_tensor,
        "block_size": BLOCK // 4,
        "compress_ratio": 4,
    }
    names = inspect.signature(get_compressed_slot_mapping).parameters
    want = get_compressed_slot_mapping(**{n: v for n, v in values.items() if n in names})
    assert built.slot_mapping.tolist() == want.tolist()
    assert built.ends.tolist() == ((common.positions + 1) // 4).tolist()
    assert (built.max_seq_len, built.num_decode_tokens) == (max(SEQUENCE), tokens)
    generator = torch.Generator().manual_seed(2)
    kv_cache = torch.zeros(BLOCKS, BLOCK // 4, 132, dtype=torch.uint8)
    keys = torch.randn(BLOCKS * BLOCK // 4, 128, generator=generator).bfloat16()
    pages = planar_pages(kv_cache, "index_keys")
    winnow.write(keys, torch.arange(len(keys)), pages, scale="pow2")
    q = torch.randn(tokens, 8, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.rand(tokens, 8, generator=generator)
    topk = torch.full((TOKENS, TOPK), -7, dtype=torch.int32)
    with set_forward_context({NAMES["keys"]: built}, config, num_tokens=tokens):
        indexer.sparse_attn_indexer(
            *[torch.zeros(tokens, 8), NAMES["keys"], kv_cache, q, None, None, weights],
            *[128, "ue8m0", TOPK, 128, LENGTH, LENGTH, topk, True],
        )
    want = winnow.score_select(
        q,
        weights,
        i32((common.positions + 1) // 4),
        TOPK,
        keys=pages,
        block_table=common.block_table_tensor,
        requests=i32(np.repeat(np.arange(len(QUERY)), QUERY)),
    )
    assert torch.equal(topk[:tokens], want) and (topk[tokens:] == -7).all()
