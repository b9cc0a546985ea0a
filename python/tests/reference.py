"""What winnow computes, once more, in PyTorch and fp64, from docs/cache-format.md."""

import torch

INF = float("inf")


def records(cache, fmt, page):
    """[pages, page bytes] uint8 -> [pages * page, d] fp64: the values of every record."""
    pages = cache.shape[0]
    if fmt.endswith("bf16"):
        d = {"v32_bf16": 576, "v4_bf16": 512, "index_keys_bf16": 128}[fmt]
        return cache[:, : page * d * 2].contiguous().view(torch.bfloat16).view(-1, d).double()
    if fmt == "v32_fp8":
        rows = cache[:, : page * 656].reshape(pages * page, 656)
        scale = rows[:, 512:528].contiguous().view(torch.float32).double().repeat_interleave(128, 1)
        nope, rope = rows[:, :512], rows[:, 528:]
    else:
        tile, width, rope_at = (64, 576, 448) if fmt == "v4_fp8" else (128, 128, 128)
        rows = cache[:, : page * width].reshape(pages * page, width)
        tail = cache[:, page * width : page * (width + (8 if fmt == "v4_fp8" else 4))].contiguous()
        if fmt == "v4_fp8":
            scale = torch.exp2(tail.view(-1, 8)[:, :7].double() - 127)
        else:
            scale = tail.view(torch.float32).view(-1, 1).double()
        scale = scale.repeat_interleave(tile, 1)
        nope, rope = rows[:, :rope_at], rows[:, rope_at:]
    values = nope.contiguous().view(torch.float8_e4m3fn).double() * scale
    if rope.shape[1] == 0:
        return values
    return torch.cat([values, rope.contiguous().view(torch.bfloat16).double()], 1)


def attend(q, lists, scale, sink=None):
    """lists: (rows [n, d], indices [T, K], lengths [T] or None) -> out, lse, max_logit, magnitude.

    The magnitude, sum_j p_j |v_j|, is what rounding errors follow where values cancel.
    """
    q = q.double().cpu()
    keys, valid = [], []
    for rows, indices, lengths in lists:
        indices = indices.long().cpu()
        ok = (indices >= 0) & (indices < rows.shape[0])
        if lengths is not None:
            ok &= torch.arange(indices.shape[1]) < lengths.long().cpu()[:, None]
        k = (
            rows.cpu()[torch.where(ok, indices, 0)]
            if rows.shape[0]
            else torch.zeros(*indices.shape, q.shape[2])
        )
        keys.append(torch.where(ok[..., None], k.double(), 0.0))
        valid.append(ok)
    k, ok = torch.cat(keys, 1), torch.cat(valid, 1)
    logits = torch.einsum("thd,tkd->thk", q, k) * scale
    return softmax_over(logits.masked_fill(~ok[:, None], -INF), k[..., None, :512], sink)


def softmax_over(logits, v, sink=None):
    """logits [T, H, K], v [T, K, H or 1, d]."""
    lse = logits.logsumexp(-1) if logits.shape[-1] else torch.full(logits.shape[:2], -INF).double()
    top = logits.amax(-1) if logits.shape[-1] else lse.clone()
    p = torch.where(torch.isneginf(lse)[..., None], 0.0, torch.exp(logits - lse[..., None]))
    if sink is not None:
        p = p * torch.sigmoid(lse - sink.double().cpu())[..., None].nan_to_num(0.0)
    v = v.double().cpu().expand(-1, -1, logits.shape[1], -1)
    out = torch.einsum("thk,tkhd->thd", p, v)
    magnitude = torch.einsum("thk,tkhd->thd", p, v.abs())
    return out, torch.where(torch.isneginf(lse), INF, lse), top, magnitude


def score(q, weights, keys, scales, starts, ends):
    """q [T, H, 128] and keys [N, 128] as fp64 values; -inf outside [start, end)."""
    dot = torch.einsum("thd,nd->thn", q.double(), keys.double()).clamp_min(0)
    logits = torch.einsum("th,thn->tn", weights.double(), dot) * scales.double()
    column = torch.arange(keys.shape[0])
    return logits.masked_fill((column < starts[:, None]) | (column >= ends[:, None]), -INF)


def select(logits, topk, starts, ends):
    """By sorting: value descending (NaN last), index ascending; the ids ascend, -1 behind them."""
    out = torch.full((logits.shape[0], topk), -1, dtype=torch.int32)
    for t, row in enumerate(logits.tolist()):
        columns = range(max(int(starts[t]), 0), min(int(ends[t]), len(row)))
        order = sorted(
            columns, key=lambda j: (row[j] != row[j], -row[j] if row[j] == row[j] else 0, j)
        )
        picked = sorted(order[:topk])
        out[t, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
    return out


def locate(ids, requests, table, page, pages):
    out = torch.full_like(ids, -1)
    for t in range(ids.shape[0]):
        for j, i in enumerate(ids[t].tolist()):
            r = int(requests[t])
            if i < 0 or i // page >= table.shape[1] or not 0 <= r < table.shape[0]:
                continue
            p = int(table[r, i // page])
            if 0 <= p < pages:
                out[t, j] = p * page + i % page
    return out
