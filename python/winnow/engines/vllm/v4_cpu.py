"""vLLM's DeepSeek V4 on a CPU by winnow: on any x86-64 machine, with any top-k.

vLLM's own layer calls kernels that its build for AMX has and its other builds have not, and its
selection takes a top-k of 512 only. The functions here stand in the places of vLLM's methods and
keep its caches: the window's and the compressed states' records, the index keys, and the
compressor's states.

Besides attention those builds lack the mixing of residual streams and the routing of experts, for
which vLLM has PyTorch code, or has it for every other model. Where the compiled function is there
it stays.
"""

from __future__ import annotations

import collections

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import mhc
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.models.deepseek_v4.cpu import cpu_compressor, cpu_mla, cpu_sparse

import winnow
from winnow.engines.hooks import Changes
from winnow.engines.vllm.indexer import WinnowV4IndexerBackend
from winnow.engines.vllm.v4 import attend
from winnow.engines.vllm.v4_layer import (
    compress,
    int32,
    prepare_index_query,
    prepare_query_and_write,
    table,
)


def keep_output_weight(self) -> None:
    """The grouped output projection as it was loaded, in place of a packing for AMX."""

    def keep(layer):
        weight = cpu_sparse._dequant_linear_weight(layer).bfloat16()
        self._wo_a_packed = weight.view(self.n_local_groups, self.o_lora_rank, -1)
        for name in ("weight", "weight_scale_inv", "weight_scale"):
            if hasattr(layer, name):
                setattr(layer, name, torch.nn.Parameter(torch.empty(0), requires_grad=False))

    self.wo_a.quant_method.process_weights_after_loading = keep


def project_output(self, o, positions):
    if get_forward_context().attn_metadata is None:
        return o.new_zeros(o.shape[0], self.hidden_size)
    o = winnow.rotate(o, int32(positions), table(self.rotary_emb), inverse=True)
    groups = o.view(o.shape[0], self.n_local_groups, -1).transpose(0, 1)
    projected = torch.bmm(groups, self._wo_a_packed.transpose(1, 2))
    return self.wo_b(projected.transpose(0, 1).flatten(1))


def forward_mqa(self, q, kv, positions, output):
    if get_forward_context().attn_metadata is None:
        output.zero_()
    else:
        attend(self, q, positions, output)


def no_schedules(self, num_decode_tokens):
    """FlashMLA's schedules, of which a CPU has none, for every kind of layer: vLLM's own method
    leaves out kinds that vLLM's builder then looks up."""
    return collections.defaultdict(lambda: None)


def collapse_streams(self, hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps):
    """The residual streams as one, weighted by a gate of all of them."""
    streams = hidden_states.flatten(-2).float()
    streams = streams * torch.rsqrt(streams.square().mean(-1, keepdim=True) + rms_norm_eps)
    gate = torch.sigmoid(streams @ hc_fn.T * hc_scale + hc_base) + hc_eps
    return (gate.unsqueeze(-1) * hidden_states).sum(-2).to(hidden_states.dtype)


def route(
    router_logits,
    top_k,
    renormalize,
    e_score_correction_bias,
    routed_scaling_factor,
    input_ids,
    hash_indices_table,
):
    """V4's choice of experts: by score and bias, or by a table of token ids."""
    scores = torch.nn.functional.softplus(router_logits.float()).sqrt()
    if hash_indices_table is None:
        ids = (scores + e_score_correction_bias).topk(top_k, dim=-1).indices
    else:
        ids = hash_indices_table[input_ids].long()
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * routed_scaling_factor
    return weights, ids.int()


def replace(changes: Changes) -> None:
    attention = cpu_sparse.DeepseekV4CPUAttention
    for name, method in {
        "_wrap_wo_a_process_weights_after_loading": keep_output_weight,
        "_o_proj": project_output,
        "_fused_qnorm_rope_kv_insert": prepare_query_and_write,
        "forward_mqa": forward_mqa,
    }.items():
        changes.set(attention, name, method)
    changes.set(cpu_sparse, "_fused_indexer_q_rope_quant_cpu", prepare_index_query)
    changes.set(cpu_compressor.DeepseekV4CPUCompressor, "forward", compress)
    cache = cpu_sparse.DeepseekV4CPUIndexerCache
    changes.set(cache, "get_attn_backend", lambda self: WinnowV4IndexerBackend)
    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    changes.set(builder, "build_tile_scheduler", no_schedules)
    if not hasattr(torch.ops._C, "hc_pre_fused_cpu"):
        changes.set(mhc.MHCPreOp, "forward_cpu", mhc.MHCPreOp.forward_native)
        changes.set(mhc.MHCPostOp, "forward_cpu", mhc.MHCPostOp.forward_native)
        for name in ("forward_cpu", "forward_native"):
            changes.set(mhc.HCHeadOp, name, collapse_streams)
    if not hasattr(torch.ops._C, "biased_topk_cpu"):
        changes.set(cpu_router, "_sqrtsoftplus_bias_topk", route)
