"""Prompts no longer than the top-k: winnow's builder names them as prefills, which vLLM's layer
then serves by dense attention, and leaves every other step to winnow's sparse attention."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import common_metadata
from vllm.config import VllmConfig

HEADS, TOPK, PAGE, PAGES, TOKENS = 16, 512, 64, 40, 1024


class Backend:
    """As much of vLLM's dense prefill kernels as its builder calls."""

    def clone(self):
        return self

    def prepare_metadata(self, prefill):
        self.prepared = prefill


def seen(config, backend, force_mqa=False):
    """What the builders read of a configuration."""
    dims = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    text = SimpleNamespace(index_topk=TOPK, q_lora_rank=None, v_head_dim=128, **dims)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text,
            hf_config=text,
            dtype=torch.bfloat16,
            max_model_len=4096,
            get_num_attention_heads=lambda parallel: HEADS,
            model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS),
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS, max_num_seqs=64),
        cache_config=SimpleNamespace(block_size=PAGE, cache_dtype="auto"),
        parallel_config=config.parallel_config,
        attention_config=SimpleNamespace(sparse_mla_force_mqa=force_mqa, hisparse_config=None),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(prefill_backend=backend)}
        ),
        speculative_config=None,
    )


def builder(backend, **more):
    from winnow.engines.vllm.sparse_mla import WinnowSparseMetadataBuilder

    spec = SimpleNamespace(block_size=PAGE)
    config = seen(VllmConfig(), backend, **more)
    return WinnowSparseMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def batch(query, sequence):
    return common_metadata(np.random.default_rng(0), query, sequence, PAGE, PAGES)


# Two decodes; then a prompt, a chunk of another, and, where it fits, a third.
DECODES, SHORT = ([1, 3], [900, 700]), ([200, 300, 129], [200, 400, TOPK])


def test_short_prompts_are_dense():
    made = builder(Backend())
    assert made.reorder_batch_threshold == 128
    common = batch(DECODES[0] + SHORT[0], DECODES[1] + SHORT[1])
    built = made.build(0, common)
    assert (built.num_decodes, built.num_decode_tokens, built.num_prefills) == (2, 4, 3)
    assert built.prefill_max_seq_len == TOPK and built.num_actual_tokens == 633
    starts = (common.query_start_loc[2:] - common.query_start_loc[2]).tolist()
    assert built.prefill.query_start_loc.tolist() == starts
    assert built.prefill.max_query_len == 300 and built.prefill.chunked_context is not None
    assert built.prefill.prefill_backend.prepared is built.prefill
    # The tokens of all requests, since a captured graph may attend to all of them sparsely.
    want = np.repeat(np.arange(5), DECODES[0] + SHORT[0]).tolist()
    assert built.req_id_per_token.tolist() == want


def test_prompts_alone():
    built = builder(Backend()).build(0, batch([200, 300], [200, 300]))
    assert (built.num_decodes, built.num_decode_tokens, built.num_prefills) == (0, 0, 2)
    assert built.prefill.chunked_context is None


@pytest.mark.parametrize(
    "query, sequence",
    [
        DECODES,
        # Few new tokens are cheaper from the cache.
        ([128, 5], [128, 5]),
        # One prompt that is longer than the top-k.
        ([1, 200, 300], [900, 200, TOPK + 1]),
    ],
)
def test_sparse(query, sequence):
    built = builder(Backend()).build(0, batch(query, sequence))
    assert built.num_decode_tokens == built.num_actual_tokens == sum(query)
    assert built.num_prefills == 0 and built.prefill is None


def test_never_in_a_graph():
    """A captured graph is replayed for longer prompts as well."""
    made = builder(Backend())
    built = made.build_for_cudagraph_capture(batch(*SHORT))
    assert built.prefill is None and built.num_decode_tokens == sum(SHORT[0])


@pytest.mark.parametrize("backend, more", [(None, {}), (Backend(), {"force_mqa": True})])
def test_without_dense_kernels(backend, more):
    made = builder(backend, **more)
    assert made.reorder_batch_threshold is None
    assert made.build(0, batch(*SHORT)).prefill is None


def test_workspace_is_smaller_than_theirs():
    from vllm.model_executor.layers.attention import sparse_mla_attention

    made = builder(Backend())
    rows = made.dense._builder.chunked_prefill_workspace.shape[0]
    their = sparse_mla_attention.SparseMLACommonMetadataBuilder
    config = made.dense._builder.vllm_config
    assert rows == 8 * TOPK < their.determine_chunked_prefill_workspace_size(config)


def test_what_goes_wrong_is_a_line_in_the_log(lines, monkeypatch):
    from winnow.engines.vllm import dense

    monkeypatch.setattr(dense._TheirBuilder, "__init__", lambda *a: 1 / 0)
    built = builder(Backend()).build(0, batch(*SHORT))
    assert built.prefill is None
    assert lines == ["winnow: no dense prefills: ZeroDivisionError: division by zero"]
