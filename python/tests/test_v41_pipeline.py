"""DeepSeek V4.1's layers by plan() and pipeline(), with torch's GEMMs, against the oracle."""

import pytest
import torch
from torch.nn import functional

import test_v41
import winnow
from conftest import on
from test_layers import close, random
from winnow.torch.rope import RopeTables

PAGE, CONTEXT, REQUESTS = 16, 320, 2
FORMATS = {"bf16": ("v4_bf16", "index_keys_bf16"), "fp8": ("v4_fp8", "index_keys")}


class Paged:
    """A cache whose pages are dealt out to the requests in turn."""

    def __init__(self, record, ratio, device):
        pages = CONTEXT // ratio // PAGE
        memory = torch.zeros(
            winnow.cache_shape(record, REQUESTS * pages, PAGE), dtype=torch.uint8, device=device
        )
        self.cache = winnow.Cache(memory, record, PAGE)
        self.pages = REQUESTS * pages
        table = torch.arange(self.pages, dtype=torch.int32, device=device)
        self.table = table.view(pages, REQUESTS).T.contiguous()


class Stack:
    """The layers of the test's model, each step of a layer one call behind its projections.

    A layer that keeps states has compress() in front of it, whose latents are projected to index
    keys. Readers name its caches, and the ids and blocks that layers before them chose.
    """

    def __init__(self, device, dtype="bf16", mode="auto"):
        self.layers = test_v41.layers_of(device)
        self.device = device
        self.ropes = RopeTables(torch.device(device))
        self.ropes.reserve(CONTEXT)
        record, key = FORMATS[dtype]
        self.windows = [Paged(record, 1, device) for _ in self.layers]
        self.entries, self.keys, self.states, self.plans = {}, {}, {}, {}
        for n, layer in enumerate(self.layers):
            c = layer.config
            if c.makes_entries:
                self.entries[n] = Paged(record, c.ratio, device)
                self.keys[n] = Paged(key, c.ratio, device)
                if c.ratio > 1:
                    self.states[n] = torch.zeros(REQUESTS, 8, 1024, device=device)
            if c.ratio not in self.plans:
                self.plans[c.ratio] = winnow.Plan(
                    model="v4",
                    format=record,
                    heads=c.heads,
                    topk=c.window,
                    extra_topk=c.topk if c.ratio else 0,
                    ratio=c.ratio,
                    index_heads=c.index_heads,
                    page=PAGE,
                    pages=REQUESTS * CONTEXT // PAGE,
                    max_requests=REQUESTS,
                    max_tokens=2 * CONTEXT,
                    max_context=CONTEXT,
                    mode=mode,
                    device=device,
                )

    def step(self, rows, parts):
        """parts: (request, first position, behind the last); x as rows of all of them."""
        starts = [0]
        for _, first, last in parts:
            starts.append(starts[-1] + last - first)
        for plan in self.plans.values():
            plan.refill(starts, [last for _, _, last in parts])
        order = torch.tensor([request for request, _, _ in parts], device=self.device)
        positions = torch.cat([torch.arange(a, b) for _, a, b in parts]).int().to(self.device)
        numbers = torch.repeat_interleave(
            torch.arange(len(parts)), torch.tensor([b - a for _, a, b in parts])
        ).int()
        at = (order, positions, numbers.to(self.device))
        self.source = self.ids = self.blocks = None
        return [self.run(n, rows, at) for n in range(len(self.layers))]

    def run(self, n, x, at):
        layer, (order, positions, requests) = self.layers[n], at
        c, window = layer.config, self.windows[n]
        rope = self.ropes.table(c.rope)
        q_a, kv = functional.linear(x, layer.qkv_a).split([c.q_lora, 512], 1)
        q_c = winnow.norm(q_a.contiguous(), layer.q_a_norm, eps=c.eps)
        extra = self.shared(n, x, q_c, rope, at) if c.ratio else {}
        if c.makes_entries:
            self.source = n
        result = winnow.pipeline(
            self.plans[c.ratio],
            functional.linear(q_c, layer.q_b).view(-1, c.heads, 512),
            kv.contiguous(),
            winnow.compressed_slots(
                positions,
                requests,
                window.table[order].contiguous(),
                ratio=1,
                page=PAGE,
                pages=window.pages,
            ),
            window.cache,
            window.table[order].contiguous(),
            scale=512**-0.5,
            sink=layer.sinks,
            table=rope,
            eps=c.eps,
            kv_norm=layer.kv_norm,
            **extra,
        )
        out, *chosen = result if isinstance(result, tuple) else (result,)
        if c.chooses:
            self.ids = chosen[0]
        if c.finds_blocks:
            self.blocks = chosen[1]
        groups = out.view(len(x), c.groups, -1).transpose(0, 1)
        low_rank = torch.bmm(groups, layer.o_a).transpose(0, 1).reshape(len(x), -1)
        return functional.linear(low_rank, layer.o_b)

    def shared(self, n, x, q_c, rope, at):
        """Arguments of a layer with entries, its own or another's."""
        layer, order = self.layers[n], at[0]
        c, source = layer.config, n if layer.config.makes_entries else self.source
        entries, keys = self.entries[source], self.keys[source]
        extra = {
            "compressed": entries.cache,
            "compressed_table": entries.table[order].contiguous(),
        }
        if not c.chooses:
            return {**extra, "ids": self.ids}
        if c.makes_entries:
            latent = self.compress(n, x, rope, at)
            extra["index_k"] = functional.linear(latent, layer.index_k)
            extra["index_norm"] = layer.index_norm
        if c.finds_blocks:
            extra |= {"best": c.candidates, "block": c.block}
        if c.within_blocks:
            extra |= {"within": self.blocks, "block": c.block}
        return extra | {
            "index_keys": keys.cache,
            "index_table": keys.table[order].contiguous(),
            "raw_index_q": functional.linear(q_c, layer.index_q).view(-1, c.index_heads, 128),
            "raw_index_weights": functional.linear(x, layer.index_w),
            "index_factor": (c.index_heads * 128) ** -0.5,
            "ids": True,
        }

    def compress(self, n, x, rope, at):
        layer, (order, positions, requests) = self.layers[n], at
        c, entries = layer.config, self.entries[n]
        latent = torch.zeros(len(x), 512, dtype=torch.bfloat16, device=x.device)
        state = {}
        if c.ratio > 1:
            state = {
                "state": self.states[n],
                "state_table": order.int()[:, None].contiguous(),
                "ring": True,
            }
        winnow.compress(
            layer.entry_rows(x.bfloat16()),
            positions,
            requests=requests,
            ratio=c.ratio,
            gate=c.ratio > 1,
            norm_weight=layer.entry_norm,
            eps=c.eps,
            table=rope,
            slots=winnow.compressed_slots(
                positions,
                requests,
                entries.table[order].contiguous(),
                ratio=c.ratio,
                page=PAGE,
                pages=entries.pages,
            ),
            cache=entries.cache,
            latent=latent,
            **state,
        )
        return latent


STEPS = [
    [(0, 0, 131)],
    [(0, 131, 132), (1, 0, 290)],
    [(1, 290, 291), (0, 132, 251)],
    [(0, 251, 255), (1, 291, 292)],  # its last three tokens are rejected
    [(0, 252, 299), (1, 292, 300)],
    [(0, 299, 300)],
]


def run(stack, x):
    """What every layer gives for the tokens of both requests, drafts written over."""
    got = [[torch.zeros(300, 64) for _ in stack.layers] for _ in x]
    for number, parts in enumerate(STEPS):
        rows = torch.cat([x[request][a:b] for request, a, b in parts]).clone()
        if number == 3:
            rows[1:4] = 3.0
        out, at = stack.step(rows.to(stack.device), parts), 0
        for request, a, b in parts:
            for n, y in enumerate(out):
                got[request][n][a:b] = y[at : at + b - a].float().cpu()
            at += b - a
    return got


@on("attend", "compress", "write", "score", "select")
def test_against_the_oracle(device):
    """The batches and the bounds of test_v41.py, with bf16 caches."""
    x = [random(300, 64, seed=s).bfloat16() for s in (1, 2)]
    got = run(Stack(device), x)
    for request in range(REQUESTS):
        for n, want in enumerate(test_v41.oracle(x[request])):
            error = (got[request][n] - want).abs().amax(1) / want.abs().max()
            assert (error < 2.0**-6).float().mean() > 0.97, (
                f"layer {n}: {error.sort().values[-12:]}"
            )
            close(got[request][n], want)


@pytest.mark.parametrize("mode", ["mixed", "separate", "direct"])
def test_modes_of_fp8_caches(mode):
    """Pages or gathered rows: what a token sees is the same."""
    x = [random(300, 64, seed=s).bfloat16() for s in (1, 2)]
    want, got = run(Stack("cpu", "fp8", "mixed"), x), run(Stack("cpu", "fp8", mode), x)
    for request in range(REQUESTS):
        for n in range(test_v41.COUNT):
            close(got[request][n], want[request][n])
