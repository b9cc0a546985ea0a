"""winnow's indexer in the real vLLM on a pretended Hopper: as operator and as a direct call."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch
from batches import PADDING, QUERY, SEQUENCE, padded_metadata
from versions import since
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

LAYERS = "vllm.model_executor.layers.sparse_attn_indexer"
HEADS, TOPK, PAGE, PAGES = 8, 16, 64, 12
NAME = "layer.indexer.k_cache"


@pytest.fixture
def models(plugin):
    """vLLM's model module, imported before or after the plugin registered."""
    assert plugin.register() is True
    return importlib.import_module("vllm.model_executor.models.deepseek_v2")


@pytest.fixture
def config():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def cache_layer(models, config):
    return models.DeepseekV32IndexerCache(
        head_dim=132, dtype=torch.uint8, prefix=NAME, cache_config=config.cache_config
    )


def test_replaced_and_restored(plugin, models):
    from vllm.model_executor.custom_op import op_registry_oot

    from winnow.engines.vllm import indexer

    layers = importlib.import_module(LAYERS)
    assert layers.sparse_attn_indexer is indexer.sparse_attn_indexer
    if since(0, 32):
        # Who calls the function directly; 0.26's module needs compiled code to be imported.
        direct = importlib.import_module("vllm.models.deepseek_v32.attention")
        assert direct.sparse_attn_indexer is indexer.sparse_attn_indexer
    assert op_registry_oot["SparseAttnIndexer"] is indexer.WinnowSparseAttnIndexer
    plugin.unregister()
    assert layers.sparse_attn_indexer is indexer._their_function
    assert "SparseAttnIndexer" not in op_registry_oot
    assert models.DeepseekV32IndexerCache.__init__.__module__ == models.__name__


def test_refused(models, config, lines):
    """Context-parallel ranks merge their top-k: vLLM's indexer stays."""
    config.parallel_config.decode_context_parallel_size = 2
    layer = cache_layer(models, config)
    assert layer.get_attn_backend().__module__.startswith("vllm.")
    assert lines == [
        f"winnow: indexer not used for {NAME}: "
        "winnow does not merge the top-k of context-parallel ranks"
    ]


def test_other_scales(models, config, lines, monkeypatch):
    """As on Blackwell since 0.33: records of as many bytes, which say something else."""
    layers = importlib.import_module(LAYERS)
    monkeypatch.setattr(layers, "mqa_logits_use_mx_scales", lambda: True, raising=False)
    layer = cache_layer(models, config)
    assert layer.get_attn_backend().__module__.startswith("vllm.")
    assert lines == [
        f"winnow: indexer not used for {NAME}: "
        "winnow's index keys have an f32 scale, vLLM's have ue8m0 scales here"
    ]


def reference(q, weights, keys, scales, table, topk, page=PAGE):
    """The top-k of each token by plain PyTorch, in ascending order; ties do not occur."""
    rows, at = [], 0
    for request, (query, sequence) in enumerate(zip(QUERY, SEQUENCE, strict=True)):
        for end in range(sequence - query + 1, sequence + 1):
            seen = torch.arange(end)
            slot = table[request][seen // page].long() * page + seen % page
            dots = torch.relu(q[at].float() @ keys[slot].float().T) * scales[slot]
            logits = (dots * weights[at][:, None]).sum(0)
            chosen = logits.topk(min(topk, end)).indices.sort().values.tolist()
            rows.append(chosen + [-1] * (topk - len(chosen)))
            at += 1
    return rows + [[-1] * topk] * PADDING


@pytest.mark.parametrize("way", ["operator", "direct"])
@pytest.mark.parametrize("wanted", [TOPK, max(SEQUENCE)])
def test_topk(models, config, way, wanted, monkeypatch):
    """Where the top-k is no smaller than any context, nothing is scored."""
    from winnow.engines.vllm import indexer

    layer = cache_layer(models, config)
    assert layer.get_attn_backend() is indexer.WinnowIndexerBackend
    common = padded_metadata(PAGE, PAGES)
    seen = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64))
    builder = layer.get_attn_backend().get_builder_cls()
    built = builder(SimpleNamespace(block_size=PAGE), [NAME], seen, torch.device("cpu")).build(
        0, common
    )
    tokens = common.num_actual_tokens
    generator = torch.Generator().manual_seed(2)
    kv_cache = torch.zeros(PAGES, PAGE, 132, dtype=torch.uint8)
    keys = torch.randn(PAGES * PAGE, 128, generator=generator).bfloat16()
    import winnow
    from winnow.engines.vllm.sparse_mla import planar_pages

    pages = planar_pages(kv_cache, "index_keys")
    winnow.write(keys, torch.arange(PAGES * PAGE), pages, scale="pow2")
    k = torch.randn(tokens, 128, generator=generator).bfloat16()
    q = torch.randn(tokens, HEADS, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.rand(tokens, HEADS, generator=generator)
    topk = torch.full((64, wanted), -7, dtype=torch.int32)
    scored, score_select = [], winnow.score_select
    monkeypatch.setattr(
        winnow, "score_select", lambda *a, **k: scored.append(1) or score_select(*a, **k)
    )
    layer.kv_cache = kv_cache
    values = {
        "hidden_states": torch.zeros(tokens, 8),
        "k_cache_prefix": NAME,
        "kv_cache": kv_cache,
        "q_quant": q,
        "q_scale": None,
        "k": k,
        "weights": weights,
        "quant_block_size": 128,
        "scale_fmt": "ue8m0",
        "topk_tokens": wanted,
        "head_dim": 128,
        "max_model_len": 1024,
        "total_seq_lens": 1024,
        "topk_indices_buffer": topk,
        "skip_k_cache_insert": False,
        "use_pcp": False,
        "pcp_shard_decode_requests": False,
        "dense_mha_metadata_layer_name": "",
    }
    names = list(inspect.signature(indexer._their_function).parameters)
    if way == "operator":
        function = torch.ops.vllm.sparse_attn_indexer
        from vllm.utils.torch_utils import _encode_layer_name

        for name in ("k_cache_prefix", "dense_mha_metadata_layer_name"):
            values[name] = _encode_layer_name(values[name])
    else:
        function = importlib.import_module(LAYERS).sparse_attn_indexer
    with set_forward_context({NAME: built}, config, num_tokens=tokens):
        function(*[values[name] for name in names if name in values])
    flat = kv_cache.view(PAGES, PAGE * 132)
    stored = flat[:, : PAGE * 128].reshape(-1, 128).view(torch.float8_e4m3fn)
    scales = flat[:, PAGE * 128 :].contiguous().view(torch.float32).reshape(-1)
    want = reference(q, weights, stored, scales, common.block_table_tensor, wanted)
    assert topk[:tokens].tolist() == want
    assert len(scored) == (wanted < max(SEQUENCE))
    # The new keys are in the cache, and what lies behind the batch was left alone.
    new = common.slot_mapping[:-PADDING]
    old = keys[new].float()
    read = stored[new].float() * scales[new][:, None]
    assert not torch.allclose(read, old, atol=0.5) and (topk[tokens:] == -7).all()


def test_profiling_takes_no_memory(models, config):
    """Without metadata vLLM measures memory: winnow's indexer reserves none."""
    from winnow.engines.vllm import indexer

    layer = cache_layer(models, config)
    assert layer.by_winnow
    topk = torch.zeros(4, TOPK, dtype=torch.int32)
    with set_forward_context(None, config, num_tokens=4):
        got = indexer.sparse_attn_indexer(
            *[None, NAME, None, None, None, None, None, 128, "ue8m0", TOPK, 128, 1024, 1024],
            topk,
            False,
        )
    assert got is topk
