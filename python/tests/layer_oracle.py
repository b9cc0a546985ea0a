"""The attention layers once more, in plain torch over a whole sequence, rounding as docs/layers.md.

Everything is fp32 (attention fp64) except where r() rounds to bf16; projections are torch's bf16
GEMMs. There are no caches: what a layer computes must not depend on how a sequence was cut.
"""

import math

import torch
from torch.nn import functional

NEVER = float("-inf")


def r(x):
    """Rounded to bf16."""
    return x.bfloat16().float()


def rms(x, weight=None, eps=1e-6):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return r(y if weight is None else y * weight.float())


def frequencies(parameters):
    """RoPE's 32 frequencies, YaRN's where the parameters say so."""
    theta = parameters["rope_theta"]
    f = theta ** (-torch.arange(0, 64, 2).double() / 64)
    if parameters.get("rope_type", "default") == "default":
        return f.float()

    def pair(turns):
        original = parameters["original_max_position_embeddings"]
        return 64 * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(parameters.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair(parameters.get("beta_slow", 1))), 63)
    ramp = ((torch.arange(32).double() - low) / (high - low)).clamp(0, 1)
    return (f * (1 - ramp) + f / parameters["factor"] * ramp).float()


def rotate(x, positions, f, half=False, sign=1.0):
    """x [tokens, ..., 64]: pairs (2i, 2i + 1), or (i, i + 32); rounded once."""
    angles = (positions.float()[:, None] * f).double()
    shape = (len(positions), *[1] * (x.dim() - 2), 32)
    c, s = angles.cos().float().view(shape), sign * angles.sin().float().view(shape)
    u, v = (x[..., :32], x[..., 32:]) if half else (x[..., 0::2], x[..., 1::2])
    u, v = u * c - v * s, v * c + u * s
    return r(torch.cat([u, v], -1) if half else torch.stack([u, v], -1).flatten(-2))


def rotate_last(x, positions, f, sign=1.0):
    return torch.cat([x[..., :-64], rotate(x[..., -64:], positions, f, sign=sign)], -1)


def rotate_first(x, positions, f, half):
    return torch.cat([rotate(x[..., :64], positions, f, half), x[..., 64:]], -1)


def linear(x, module):
    """A projection in bf16 by torch."""
    return functional.linear(x.bfloat16(), module.weight.bfloat16()).float()


def top(logits, visible, k):
    """[tokens, keys] bool: the k largest of each row's visible ones, ties to the lowest index."""
    logits = logits.masked_fill(~visible, NEVER)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(visible).scatter(1, order, True) & visible


def index_logits(queries, weights, keys):
    return torch.einsum("th,thj->tj", weights, torch.einsum("thd,jd->thj", queries, keys).relu())


def attend(q, k, v, chosen, scale, sinks=None):
    """Rounded to bf16. q [tokens, heads, d], k and v [keys, d], chosen [tokens, keys]."""
    logits = torch.einsum("thd,jd->thj", q.double(), k.double()) * scale
    logits = logits.masked_fill(~chosen[:, None], NEVER)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1).expand(*logits.shape[:2], 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., : len(k)]
    return r(torch.einsum("thj,jd->thd", weights, v.double()))


class Mla(torch.nn.Module):
    """DeepSeek V3.2 and GLM-5; `shared` carries the choice of the last layer with an indexer."""

    def __init__(self, module, shared):
        super().__init__()
        self.module, self.config, self.shared = module, module.config, shared
        self.glm = self.config.model_type == "glm_moe_dsa"

    def forward(self, hidden_states, **unused):
        m, c = self.module, self.config
        x = hidden_states[0].float()
        tokens = len(x)
        at = torch.arange(tokens)
        f = frequencies(c.rope_parameters)
        eps = m.q_a_layernorm.variance_epsilon
        q_c = rms(linear(x, m.q_a_proj), m.q_a_layernorm.weight, eps)
        q = linear(q_c, m.q_b_proj).view(tokens, m.num_heads, -1)
        kv = linear(x, m.kv_a_proj_with_mqa)
        latent = rms(kv[:, :512], m.kv_a_layernorm.weight, eps)
        keys = torch.cat([latent, rotate(kv[:, 512:], at, f)], -1)
        if m.indexer is not None:
            self.shared["chosen"] = self.select(x, q_c, at, f)
        up = m.kv_b_proj.weight.bfloat16().float().view(m.num_heads, -1, 512)
        nope = m.qk_nope_head_dim
        absorbed = r(torch.einsum("thp,hpl->thl", q[..., :nope], up[:, :nope]))
        q = torch.cat([absorbed, rotate(q[..., nope:], at, f)], -1)
        out = attend(q, keys, latent, self.shared["chosen"], m.scaling)
        out = r(torch.einsum("thl,hvl->thv", out, up[:, nope:])).flatten(1)
        out = linear(out, m.o_proj).to(hidden_states.dtype)[None]
        return (out, None, None) if self.glm else (out, None)

    def select(self, x, q_c, at, f):
        i = self.module.indexer
        half = not self.glm
        queries = linear(q_c, i.wq_b).view(len(x), i.n_heads, 128)
        queries = rotate_first(queries, at, f, half)
        k_norm = (i.k_norm.weight.float(), i.k_norm.bias.float(), 1e-6)
        keys = r(functional.layer_norm(linear(x, i.wk), (128,), *k_norm))
        keys = rotate_first(keys, at, f, half)
        weights = linear(x, i.weights_proj) * (i.n_heads * 128) ** -0.5
        logits = index_logits(queries, weights, keys)
        return top(logits, at[None] <= at[:, None], i.index_topk)


class V4(torch.nn.Module):
    """DeepSeek V4's three kinds of layers."""

    def __init__(self, module):
        super().__init__()
        self.module, self.config = module, module.config

    def forward(self, hidden_states, **unused):
        m, c = self.module, self.config
        x = hidden_states[0].float()
        tokens = len(x)
        at = torch.arange(tokens)
        f = frequencies(c.rope_parameters[m.rope_layer_type])
        q_c = rms(linear(x, m.q_a_proj), m.q_a_norm.weight, c.rms_norm_eps)
        q = rms(linear(q_c, m.q_b_proj).view(tokens, m.num_heads, 512), eps=c.rms_norm_eps)
        q = rotate_last(q, at, f)
        keys = rms(linear(x, m.kv_proj), m.kv_norm.weight, c.rms_norm_eps)
        keys = rotate_last(keys, at, f)
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - m.sliding_window)
        if m.compressor is not None:
            entries = self.entries(x, m.compressor, f)
            keys = torch.cat([keys, entries])
            seen = torch.cat([seen, self.choice(x, q_c, at, f, len(entries))], 1)
        out = attend(q, keys, keys, seen, m.scaling, m.sinks)
        out = rotate_last(out, at, f, sign=-1.0).view(tokens, c.o_groups, -1)
        o_a = m.o_a_proj.weight.bfloat16().view(c.o_groups, c.o_lora_rank, -1)
        low_rank = torch.einsum("tgd,grd->tgr", out.bfloat16(), o_a).flatten(1)
        return linear(low_rank.float(), m.o_b_proj).to(hidden_states.dtype)[None], None

    def entries(self, x, compressor, f):
        """Pooled in fp32, then rounded behind the norm and behind RoPE."""
        ratio, dim = compressor.compress_rate, compressor.head_dim
        values = x @ compressor.kv_proj.weight.bfloat16().float().T
        scores = x @ compressor.gate_proj.weight.bfloat16().float().T
        bias = compressor.position_bias.float()
        overlap = values.shape[1] == 2 * dim
        entries = torch.zeros(len(x) // ratio, dim)
        for w in range(len(entries)):
            now = slice(ratio * w, ratio * w + ratio)
            u, z = values[now, -dim:], scores[now, -dim:] + bias[:, -dim:]
            if overlap and w > 0:
                before = slice(ratio * (w - 1), ratio * w)
                u = torch.cat([values[before, :dim], u])
                z = torch.cat([scores[before, :dim] + bias[:, :dim], z])
            entries[w] = (z.softmax(0) * u).sum(0)
        entries = rms(entries, compressor.kv_norm.weight, self.config.rms_norm_eps)
        return rotate_last(entries, torch.arange(len(entries)) * ratio, f)

    def choice(self, x, q_c, at, f, count):
        compressor = self.module.compressor
        visible = torch.arange(count)[None] < ((at + 1) // compressor.compress_rate)[:, None]
        i = getattr(compressor, "indexer", None)
        if i is None:
            return visible
        keys = self.entries(x, i, f)
        queries = rotate_last(linear(q_c, i.q_b_proj).view(len(x), i.num_heads, 128), at, f)
        weights = linear(x, i.scorer.weights_proj) * (i.num_heads * 128) ** -0.5
        return top(index_logits(queries, weights, keys), visible, i.index_topk)


def replace(model):
    """The model with the oracle in the place of its attention modules."""
    shared = {}
    for layer in model.model.layers:
        v4 = model.config.model_type == "deepseek_v4"
        layer.self_attn = V4(layer.self_attn) if v4 else Mla(layer.self_attn, shared)
    return model


class V41:
    """DeepSeek V4.1's layers, each from a mapping of names to weights; `shared` goes from one to
    the next: entries, index keys, the choice, and blocks of candidates."""

    def __init__(self, config, weights, prefix, shared):
        self.config, self.shared = config, shared
        self.weights = {name.removeprefix(prefix): w for name, w in weights.items()}

    def linear(self, x, name):
        weight = self.weights[f"{name}.weight"].bfloat16()
        return functional.linear(x.bfloat16(), weight).float()

    def norm(self, x, name):
        return rms(x, self.weights[f"{name}.weight"], self.config.eps)

    def __call__(self, x):
        c, x = self.config, x.float()
        tokens, at = len(x), torch.arange(len(x))
        f = self.frequencies()
        q_c = self.norm(self.linear(x, "wq_a"), "q_norm")
        q = rotate_last(self.linear(q_c, "wq_b").view(tokens, c.heads, 512), at, f)
        keys = rotate_last(self.norm(self.linear(x, "wkv"), "kv_norm"), at, f)
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - c.window)
        if c.ratio:
            self.store(x, f)
            if c.chooses:
                self.shared["chosen"] = self.choice(x, q_c, at, f)
            keys = torch.cat([keys, self.shared["entries"]])
            seen = torch.cat([seen, self.shared["chosen"]], 1)
        out = attend(q, keys, keys, seen, 512**-0.5, self.weights["attn_sink"])
        out = rotate_last(out, at, f, sign=-1.0).view(tokens, c.groups, -1)
        o_a = self.weights["wo_a.weight"].bfloat16().view(c.groups, c.rank, -1)
        low_rank = torch.einsum("tgd,grd->tgr", out.bfloat16(), o_a).flatten(1)
        return self.linear(low_rank.float(), "wo_b")

    def frequencies(self):
        rope = self.config.rope
        return frequencies(
            {
                "rope_theta": rope.theta,
                "rope_type": "yarn" if rope.factor > 1 else "default",
                "factor": rope.factor,
                "original_max_position_embeddings": rope.original,
            }
        )

    def store(self, x, f):
        c = self.config
        if not c.makes_entries:
            return
        values = x @ self.weights["compressor.wkv.weight"].bfloat16().float().T
        count = len(x) // c.ratio
        pooled = values[: count * c.ratio].view(count, c.ratio, 512)
        scores = torch.zeros_like(pooled)
        if c.ratio > 1:
            scores = x @ self.weights["compressor.wgate.weight"].bfloat16().float().T
            scores = scores[: count * c.ratio].view(count, c.ratio, 512)
        pooled = (scores.softmax(1) * pooled).sum(1)
        latent = self.norm(pooled, "compressor.norm")
        first = torch.arange(count) * c.ratio
        self.shared["entries"] = rotate_last(latent, first, f)
        keys = self.norm(self.linear(latent, "indexer.wk"), "indexer.k_norm")
        self.shared["keys"] = rotate_last(keys, first, f)

    def choice(self, x, q_c, at, f):
        c, keys = self.config, self.shared["keys"]
        ends = (at + 1) // c.ratio
        visible = torch.arange(len(keys))[None] < ends[:, None]
        queries = self.linear(q_c, "indexer.wq_b").view(len(x), c.index_heads, 128)
        queries = rotate_last(queries, at, f)
        weights = self.linear(x, "indexer.weights_proj") * (c.index_heads * 128) ** -0.5
        logits = index_logits(queries, weights, keys)
        if c.finds_blocks:
            self.shared["blocks"] = self.best_blocks(logits, visible, ends)
        if c.within_blocks:
            visible = visible & self.shared["blocks"]
        return top(logits, visible, c.topk)

    def best_blocks(self, logits, visible, ends):
        """[tokens, keys] bool: inside the best blocks by their largest logit, the newest in."""
        c, count = self.config, logits.shape[1]
        best = torch.zeros_like(visible)
        for t, end in enumerate(ends.tolist()):
            if end == 0:
                continue
            row = logits[t].masked_fill(~visible[t], NEVER)
            blocks = [row[b : b + c.block].max().item() for b in range(0, end, c.block)]
            blocks[-1] = float("inf")
            order = sorted(range(len(blocks)), key=lambda b: (-blocks[b], b))[: c.candidates]
            for b in order:
                best[t, b * c.block : min((b + 1) * c.block, count)] = True
        return best
