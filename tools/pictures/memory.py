"""Shared-memory maps, with sizes from the kernels' layout headers and the cache records."""

import pathlib
import re

from .picture import Picture

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_SHARED = 227 * 1024  # bytes of shared memory that a CTA may have on Hopper


class Constants(dict):
    """Names and values; says where a name was looked for."""

    path = ""

    def __missing__(self, name):
        raise ValueError(f"{self.path}: no constant {name}, which {__file__} computes sizes from")


def constants(path, struct=None):
    """Integer constants of a header, `kName = 123`; of one struct of it where that is named."""
    text = (ROOT / path).read_text()
    if struct:
        found = re.search(rf"struct {struct}\b[^;]*?{{(.*?)\n}};", text, re.S)
        if not found:
            raise ValueError(f"{path}: no struct {struct}")
        text = found.group(1)
    found = re.findall(r"\b(k\w+) = (\d+)[,;]", text)
    values = Constants({name: int(value) for name, value in found})
    values.path = path
    return values


def records():
    """The cache records as the kernels see them: dimensions, bytes of a row, columns of a scale."""
    v32 = constants("src/model/v32.h", "V32")
    v4 = constants("src/model/v4.h", "V4")
    v32_tile = constants("src/model/v32.h", "V32Fp8")["kTile"]
    v4_tile = constants("src/model/v4.h", "V4Fp8")["kTile"]
    v4_side = constants("src/model/v4.h", "V4Fp8")["kScaleBytes"]
    v32_scales = v32["kNope"] // v32_tile
    return {
        "v32": v32
        | {"row": v32["kNope"] + 4 * v32_scales + 2 * v32["kRope"], "side": 0}
        | {"scales": v32_scales},
        "v4": v4
        | {"row": v4["kNope"] + 2 * v4["kRope"], "side": v4_side}
        | {"scales": v4["kNope"] // v4_tile},
    }


def decode_memory(record, heads):
    """Fields of decode's Smem<RowTraits<fp8 record>, heads> with their bytes, as ConfigOf has."""
    c = constants("src/attend/decode_sm90/layout.cuh")
    rows, block, ahead = c["kRows"], c["kBlock"], c["kAhead"]
    pitch = record["row"] if record["row"] % 128 == 16 else record["row"] + 16
    # Of V4's two tiles the second is room for the output of many tokens.
    tiles = 2 if record["kDv"] > record["kNope"] else 1
    scales = (record["scales"] + 1) * rows * 2
    side = record["side"] * rows if record["side"] else 8
    q, p, log2_p = record["kDqk"] // 64 * heads * 128, tiles * 64 * 128, heads * 256
    few = heads * 4 * 9 + ahead * (block * 8 + 8) + 192
    per_stage = rows * pitch + side + scales + rows * 8 + 24
    stages = min(20, (MAX_SHARED - q - p - log2_p - few) // per_stage)
    scorers = 2 if heads <= 32 else 1
    barriers = 2 * stages + c["kReady"] + ahead + 9
    words = 9 * heads + 2 * stages + 3 + 4 * scorers + 1  # statistics, flags
    fields = [
        ("q", q),
        ("p", p),
        ("log2_p", log2_p),
        ("ring", stages * rows * pitch),
        ("row_lambda, side, scales", stages * (rows * 8 + side + scales)),
        ("the rest", ahead * block * 8 + 8 * barriers + 4 * words),
    ]
    return fields, stages, rows * pitch


def wide_memory(record):
    """Fields of the wide kernel's Smem<Family> with their bytes."""
    c = constants("src/attend/wide_sm90/layout.cuh")
    tile = c["kBlock"] * 128
    tiles, values = record["kDqk"] // 64, record["kDv"] // 64
    tail = tiles > values
    order = 4 * 2 * (c["kSweepBlocks"] * 16 * 2 + 4)
    small = 2 * 8 + 2 * c["kHeads"] * 4 + 2 * (2 * 2 * c["kHeads"] * 4) + 26 * 8 + 4
    return {
        "tile": tile,
        "tiles": tiles,
        "q": tiles * tile,
        "buffer": tiles * tile,
        "tail": tail,
        "p": 16 if tail else 2 * tile,
        "sorted": order,
        "small": small,
    }


def memory_bar(pic, x, top, scale, parts, total):
    """A bar of parts (kind, name, bytes, pieces) from the top; small ones are named beside it."""
    width = 150
    y = top
    names = []
    for kind, name, size, pieces in parts:
        h = size * scale
        pic.box(x, y, width, max(h, 1.5), kind)
        for k in range(1, pieces):
            pic.line([(x, y + h * k / pieces), (x + width, y + h * k / pieces)], "grid")
        label = f"{size:,} B"
        if h >= 34:
            pic.text(x + width / 2, y + h / 2 - 1, name, 12, anchor="middle", bold=True)
            pic.text(x + width / 2, y + h / 2 + 15, label, 12, anchor="middle")
        elif h >= 15:
            pic.text(x + width / 2, y + h / 2 + 4, f"{name}: {label}", 11, anchor="middle")
        else:
            names.append((y + h / 2, f"{name}: {label}"))
        y += h
    rest = total - sum(size for _, _, size, _ in parts)
    pic.box(x, y, width, max(rest * scale, 1.5), "wait", dashed=True)
    names.append((y + rest * scale / 2, f"unused: {rest:,} B"))
    # Labels beside the bar, 16 apart, the lowest where its part is.
    at = [max(p, top + 8) for p, _ in names]
    for i in range(len(at) - 2, -1, -1):
        at[i] = min(at[i], at[i + 1] - 16)
    for (part, label), y_label in zip(names, at, strict=True):
        pic.line([(x + width, part), (x + width + 10, y_label), (x + width + 16, y_label)])
        pic.text(x + width + 20, y_label + 4, label, 11)


def decode_shared():
    rec = records()
    pic = Picture(1080, 640, "Decode: shared memory of a CTA")
    pic.text(
        12,
        24,
        "Shared memory of one CTA (decode_sm90/layout.cuh: struct Smem, sizes by ConfigOf)",
        15,
        bold=True,
    )
    pic.text(
        12,
        43,
        f"A bar is the {MAX_SHARED:,} bytes that a CTA may have. The ring gets what the other "
        "fields leave, at most 20 stages.",
        12,
        "dim",
    )
    titles = {
        "q": "Q",
        "p": "P",
        "log2_p": "log2 P",
        "row_lambda, side, scales": "descriptions of rows",
        "the rest": "places, sums, barriers",
    }
    kinds = {
        "q": "plain",
        "p": "weigh",
        "log2_p": "score",
        "ring": "copy",
        "row_lambda, side, scales": "look",
        "the rest": "meet",
    }
    scale = 510 / MAX_SHARED
    for i, (name, key, heads) in enumerate(
        [
            ("V3.2, fp8 rows, 64 heads", "v32", 64),
            ("V4, fp8 rows, 64 heads", "v4", 64),
            ("V3.2, fp8 rows, 16 heads", "v32", 16),
        ]
    ):
        fields, stages, stage = decode_memory(rec[key], heads)
        x = 14 + i * 358
        pic.text(x, 74, name, 13, bold=True)
        pic.text(x, 91, f"{stages} stages of 16 rows, {stage:,} B each", 12, "dim")
        parts = [
            (kinds[f], titles.get(f, f"ring, {stages} stages"), size, stages if f == "ring" else 1)
            for f, size in fields
        ]
        memory_bar(pic, x, 104, scale, parts, MAX_SHARED)
    return pic


def wide_shared():
    rec = records()
    pic = Picture(1080, 650, "Wide attention: shared memory of a CTA")
    pic.text(12, 24, "Shared memory of one CTA (wide_sm90/layout.cuh: struct Smem)", 15, bold=True)
    pic.text(
        12,
        43,
        f"A bar is the {MAX_SHARED:,} bytes that a CTA may have. A tile is 64 rows × 64 columns of "
        "bf16, 8,192 B.",
        12,
        "dim",
    )
    scale = 520 / MAX_SHARED
    for i, (name, key) in enumerate(
        [("V3.2: 9 tiles a block, P over the ninth", "v32"), ("V4: 8 tiles a block, P apart", "v4")]
    ):
        m = wide_memory(rec[key])
        x = 14 + i * 540
        half = 4 * m["tile"]
        pic.text(x, 74, name, 13, bold=True)
        parts = [("plain", f"Q, {m['tiles']} tiles", m["q"], m["tiles"])]
        for b, kind in ((0, "copy"), (1, "look")):
            parts.append((kind, f"block {'ab'[b]}, half 0: columns 0–255", half, 4))
            parts.append((kind, f"block {'ab'[b]}, half 1: columns 256–511", half, 4))
            if m["tail"]:
                parts.append(("weigh", f"RoPE of {'ab'[b]}, then its P", m["tile"], 1))
        if not m["tail"]:
            parts.append(("weigh", "P of a and of b", m["p"], 2))
        parts.append(("score", "order of swept rows", m["sorted"], 1))
        rest = m["small"] + (m["p"] if m["tail"] else 0)
        parts.append(("meet", "references, sums, barriers", rest, 1))
        wide_bar(pic, x, 88, scale, parts)
    return pic


def wide_bar(pic, x, top, scale, parts):
    """As memory_bar(), with every name beside the bar, since they are long."""
    width = 150
    y = top
    for kind, name, size, pieces in parts:
        h = max(size * scale, 3)
        pic.box(x, y, width, h, kind)
        for k in range(1, pieces):
            pic.line([(x, y + h * k / pieces), (x + width, y + h * k / pieces)], "grid")
        small = name.startswith("references")
        label = y + h / 2 + (12 if small else 4)
        pic.line([(x + width, y + h / 2), (x + width + 10, label - 4), (x + width + 16, label - 4)])
        pic.text(x + width + 20, label, f"{name}: {size:,} B", 12)
        y += h
    used = sum(size for _, _, size, _ in parts)
    pic.text(
        x, top + 520 + 30, f"{used:,} B used, rounded up to {-(-used // 1024) * 1024:,}", 12, "dim"
    )
