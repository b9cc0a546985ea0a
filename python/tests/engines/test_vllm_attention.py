"""winnow's implementation class and metadata builder in the real vLLM, against plain PyTorch."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import PADDING, QUERY, SEQUENCE, i32, padded_metadata
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)

import winnow

HEADS, TOPK, PAGE, PAGES = 6, 24, 64, 12


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        config = VllmConfig()
        stack.enter_context(set_current_vllm_config(config))
        init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{tmp_path_factory.mktemp('dist')}/init",
            local_rank=0,
            backend="gloo",
        )
        initialize_model_parallel(1, 1)
        yield config
    cleanup_dist_env_and_memory()


def builder(config):
    from winnow.engines.vllm.sparse_mla import WinnowSparseMetadataBuilder

    seen = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=TOPK)),
        parallel_config=config.parallel_config,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    spec = SimpleNamespace(block_size=PAGE)
    return WinnowSparseMetadataBuilder(spec, ["layer"], seen, torch.device("cpu"))


def metadata(config):
    return builder(config).build(0, padded_metadata(PAGE, PAGES))


def implementation(ids, rope, kv_cache_dtype):
    from winnow.engines.vllm.sparse_mla import WinnowSparseImpl

    return WinnowSparseImpl(
        HEADS,
        512 + rope,
        0.06,
        1,
        None,
        None,
        kv_cache_dtype,
        None,
        "decoder",
        None,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=rope,
        qk_head_dim=128 + rope,
        v_head_dim=128,
        kv_b_proj=None,
        topk_indices_buffer=ids,
    )


def ids_of(requests):
    """Random ids of each token's context, fewer than fit, in any order; none for padding."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.full((len(requests), TOPK), -1, dtype=torch.int32)
    for token, request in enumerate(requests[:-PADDING].tolist()):
        count = min(SEQUENCE[request], TOPK - 2)
        chosen = torch.randperm(SEQUENCE[request], generator=generator)[:count]
        ids[token, :count] = chosen.int()
    return ids


def test_requests_of_tokens(config):
    want = [r for r, n in enumerate(QUERY) for _ in range(n)] + [len(QUERY) - 1] * PADDING
    assert metadata(config).req_id_per_token.tolist() == want


def test_drafts(config):
    """A draft model asks for metadata of its own; several tokens a request are decodes as well."""
    drafting = builder(config).build_for_drafting(padded_metadata(PAGE, PAGES), draft_index=1)
    built = metadata(config)
    assert drafting.req_id_per_token.tolist() == built.req_id_per_token.tolist()
    assert drafting.num_decode_tokens == drafting.num_actual_tokens == sum(QUERY) + PADDING


@pytest.mark.parametrize("by", ["_by_torch", "_by_triton"])
def test_tokens(by):
    """Requests and visible contexts, on a CPU and by the kernel that a GPU takes: requests without
    tokens, one request only, tokens that pad, several blocks of the kernel."""
    from winnow.engines.vllm import tokens

    rng = np.random.default_rng(7)
    for count in (1, 2, 3, 4, 7, 33):
        query = rng.integers(0, 4, count) if count < 33 else rng.integers(0, 30, count)
        context, padding = rng.integers(0, 50, count), int(rng.integers(0, 3))
        starts = np.concatenate([[0], np.cumsum(query)])
        total = int(starts[-1]) + padding
        want = [(r, context[r] + i + 1) for r in range(count) for i in range(query[r])]
        want += [(count - 1, 0)] * padding
        common = SimpleNamespace(
            num_actual_tokens=total,
            num_reqs=count,
            query_start_loc=i32(starts),
            seq_lens=i32(context + query),
        )
        requests, ends = (torch.full((total + 2,), -7, dtype=torch.int32) for _ in range(2))
        if total:
            getattr(tokens, by)(common, requests[:total], ends[:total])
        assert list(zip(requests.tolist(), ends.tolist(), strict=True)) == want + [(-7, -7)] * 2
        alone = torch.full((total + 2,), -7, dtype=torch.int32)
        tokens.fill_tokens(common, alone)
        assert torch.equal(alone, requests)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
def test_forward(config, kv_cache_dtype, rope, joined):
    generator = torch.Generator().manual_seed(3)
    built = metadata(config)
    tokens = built.num_actual_tokens
    rows = torch.randn(PAGES * PAGE, 512 + rope, generator=generator).bfloat16()
    if kv_cache_dtype == "auto":
        cache = rows.view(PAGES, PAGE, -1)
    else:
        cache = torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8)
        written = winnow.Cache(cache, "v32_fp8")
        # The RoPE part of a model without RoPE is written as zeros.
        whole = torch.nn.functional.pad(rows, (0, 64 - rope))
        winnow.write(whole, torch.arange(len(rows)), written, scale="pow2")
        table = torch.arange(PAGES, dtype=torch.int32)[None]
        length = torch.tensor([len(rows)], dtype=torch.int32)
        rows = winnow.gather(written, table, length, rows=len(rows))[:, : 512 + rope]
    q = torch.randn(tokens, HEADS, 512 + rope, generator=generator).bfloat16()
    ids = ids_of(built.req_id_per_token)
    impl = implementation(ids, rope, kv_cache_dtype)
    halves = q if joined else (q[..., :512], q[..., 512:])
    out, lse = impl.forward_mqa(halves, cache, built, None)
    assert lse is None and out.shape == (tokens, HEADS, 512) and out.is_contiguous()
    for token in range(tokens):
        picked = ids[token][ids[token] >= 0].long()
        page = built.block_table[built.req_id_per_token[token], picked // PAGE]
        keys = rows[page.long() * PAGE + picked % PAGE].double()
        weights = torch.softmax(q[token].double() @ keys.T * 0.06, -1)
        want = weights @ keys[:, :512]
        # Weights and the result are rounded to bf16: 2^-8 each of what is summed.
        bound = 2**-7 * (weights @ keys[:, :512].abs()) + 1e-6
        assert ((out[token].double() - want).abs() <= bound).all()


def test_ranks_of_a_context_parallel_group(config):
    """Each rank attends to its share of the ids; merged by lse they give the whole."""
    generator = torch.Generator().manual_seed(4)
    built, world, interleave = metadata(config), 2, 16
    built.cp_kv_cache_interleave_size = interleave
    tokens = built.num_actual_tokens
    q = torch.randn(tokens, HEADS, 576, generator=generator).bfloat16()
    ids = ids_of(built.req_id_per_token)
    # What position p of a request holds, wherever it lies.
    content = torch.randn(len(QUERY), 3 * PAGE * world, 576, generator=generator).bfloat16()
    outs, lses = [], []
    for rank in range(world):
        cache = torch.zeros(PAGES, PAGE, 576, dtype=torch.bfloat16)
        for request in range(len(QUERY)):
            at = torch.arange(content.shape[1])
            at = at[at // interleave % world == rank]
            local = torch.arange(len(at))
            page = built.block_table[request][local // PAGE].long()
            cache[page, local % PAGE] = content[request][at]
        impl = implementation(ids, 64, "auto")
        impl.dcp_world_size, impl.dcp_rank = world, rank
        impl.need_to_return_lse_for_decode = True
        out, lse = impl.forward_mqa(q, cache, built, None)
        outs.append(out)
        lses.append(lse)
    out, _ = winnow.merge(torch.stack(outs), torch.stack(lses), lse=True)
    for token in range(tokens - PADDING):
        picked = ids[token][ids[token] >= 0].long()
        keys = content[built.req_id_per_token[token], picked].double()
        weights = torch.softmax(q[token].double() @ keys.T * 0.06, -1)
        bound = 2**-6 * (weights @ keys[:, :512].abs()) + 1e-6
        assert ((out[token].double() - weights @ keys[:, :512]).abs() <= bound).all()
    assert torch.isneginf(lses[0][-PADDING:]).all() and not outs[0][-PADDING:].any()


def test_another_record(config):
    from winnow.engines.vllm.sparse_mla import pages

    with pytest.raises(ValueError, match="kv_cache: expected records of 656 bytes"):
        pages(torch.zeros(2, 64, 352, dtype=torch.uint8))
