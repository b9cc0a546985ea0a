"""Who does what over time in the attend kernels on Hopper."""

from .picture import Picture, lanes


def decode_roles():
    pic = Picture(1180, 668, "Decode: who does what over time")
    pic.text(
        12,
        24,
        "One CTA: 64 heads of a token, 4 blocks of 64 rows, splits meet in the workspace",
        15,
        bold=True,
    )
    pic.text(
        12,
        43,
        "Weigh and the axis are to scale, composed of time stamps of two builds (V3.2, 8 tokens "
        "of 128 heads, H200, 2026-11-16). The other boxes are schematic. Since then "
        "score loads all of Q here.",
        12,
        "dim",
    )
    left, right, end = 176, 1165, 31700
    x = lambda cycles: left + (right - left) * cycles / end  # noqa: E731
    names = [
        ("copy warps 0–2", "40 registers a thread"),
        ("copy warp 3", "describes 0–3, looks up"),
        ("score", "warpgroup 2, 104 regs"),
        ("weigh", "warpgroups 0, 1, 184 regs"),
    ]
    tops = lanes(pic, names, 60, 58, left, right)

    def put(lane, a, b, kind, *lines, size=11, dashed=False):
        pic.box(x(a), tops[lane] + 8, x(b) - x(a) - 1, 40, kind, *lines, size=size, dashed=dashed)

    put(0, 0, 3900, "plain", "indices,", "addresses")
    put(0, 3900, 7000, "copy", "copy 0, 1")
    put(0, 7000, 9300, "wait", "wait for", "places", dashed=True)
    put(0, 9300, 11000, "copy", "copy 2")
    put(0, 11000, 13000, "wait", "ring full", dashed=True)
    put(0, 13000, 14900, "copy", "copy 3")
    put(0, 14900, 21500, "meet", "mark own place as empty,", "exchange launch ids")
    put(1, 0, 3900, "plain", "indices,", "addresses")
    put(1, 3900, 5000, "copy", "copy")
    put(1, 5000, 7700, "wait", "until rows", "of 0 arrive", dashed=True)
    put(1, 7700, 8700, "look", "0")
    put(1, 8700, 11900, "look", "find the rows", "of 2 and 3")
    put(1, 11900, 12900, "look", "1")
    put(1, 13300, 14300, "look", "2")
    put(1, 17000, 18000, "look", "3")
    put(2, 0, 6300, "plain", "RoPE part of Q:", "load, convert")
    put(2, 6300, 8700, "wait", "until 0 is", "described", dashed=True)
    put(2, 8700, 10300, "score", "score 0", size=10)
    put(2, 10300, 12900, "wait", "until 1 is", "described", dashed=True)
    put(2, 12900, 15000, "score", "score 1")
    put(2, 15000, 17800, "score", "score 2")
    put(2, 18200, 21000, "score", "score 3")
    put(2, 22600, 28200, "meet", "collect statistics,", "weights of splits")
    put(3, 0, 6300, "plain", "NoPE part of Q:", "load, convert")
    put(3, 6300, 10300, "wait", "wait for scores", dashed=True)
    for i, (a, b) in enumerate([(10300, 15000), (15000, 18500), (18500, 22400), (22400, 25000)]):
        put(3, a, b, "weigh", f"weigh {i}")
    put(3, 25000, 26600, "meet", "store", size=11)
    put(3, 26600, 30000, "wait", "poll for parts", dashed=True)
    put(3, 30000, 31700, "meet", "add", size=11)
    axis = tops[3] + 64
    pic.line([(left, axis), (right, axis)])
    marks = [
        (0, "0"),
        (5000, "5,000"),
        (7700, "rows: 7,700"),
        (10300, "10,300"),
        (15000, "15,000"),
        (18500, "18,500"),
        (22400, "22,400"),
        (25000, "25,000"),
        (26600, ""),
        (30000, "30,000"),
        (31700, ""),
    ]
    for cycles, label in marks:
        pic.line([(x(cycles), axis - 4), (x(cycles), axis + 4)])
        pic.text(x(cycles), axis + 18, label, 11, "dim", "end" if cycles == end else "middle")
    pic.text(12, axis + 18, "cycles; 0 to 3: blocks", 11, "dim")
    decode_block(pic, axis + 56)
    return pic


def decode_block(pic, top):
    """The lower half of decode_roles(): one block in its steady state."""
    pic.text(
        12,
        top,
        "One block i in the steady state, with what is handed over (not to scale; about 3,400 "
        "cycles)",
        15,
        bold=True,
    )
    names = [
        ("copy warps 0–2", "a stage = 16 rows"),
        ("copy warp 3", ""),
        ("score", "64 rows × 64 heads"),
        ("weigh 0", "heads 0–31, cols 0–255"),
        ("weigh 1", "heads 32–63, cols 256–511"),
    ]
    height = 52
    tops = lanes(pic, names, top + 14, height, 176, 1165)

    def put(lane, a, b, kind, *lines, size=11, dashed=False):
        pic.box(a, tops[lane] + 7, b - a, 36, kind, *lines, size=size, dashed=dashed)

    put(0, 190, 400, "copy", "copy i", "4 stages, one bulk copy a row")
    put(0, 404, 614, "copy", "copy i + 1")
    put(0, 618, 828, "copy", "copy i + 2")
    put(0, 832, 1160, "copy", "copy i + 3: a stage as soon as weigh freed it")
    put(1, 420, 552, "look", "describe i:", "scales, validity")
    put(1, 556, 690, "look", "find the rows", "of i + 3")
    put(2, 200, 540, "score", "block i − 1")
    put(2, 560, 740, "score", "dequantise, Sᵀ = K Qᵀ")
    put(2, 744, 830, "score", "log2 P of i")
    put(2, 834, 1160, "score", "block i + 1")
    for lane, kind in ((3, "weigh"), (4, "weigh2")):
        put(lane, 200, 838, kind, "block i − 1")
        put(lane, 842, 912, kind, "load_scores", size=10)
        put(lane, 914, 998, kind, "make_weights", size=10)
        put(lane, 1012, 1160, kind, "multiply_values:", "4 steps of 16 rows")
    pic.box(1001, tops[3] + 3, 8, 2 * height - 12, "meet")
    pic.arrow((400, tops[0] + 25), (402, tops[0] + 25), (402, tops[1] + 25), (420, tops[1] + 25))
    pic.arrow((554, tops[1] + 43), (554, tops[2] + 25), (560, tops[2] + 25))
    pic.arrow((832, tops[2] + 43), (832, tops[2] + 48), (877, tops[2] + 48), (877, tops[3] + 7))
    pic.arrow((877, tops[3] + 43), (877, tops[4] + 7))
    y = tops[4] + height + 18
    pic.text(
        12,
        y,
        "Score needs the rows described; load_scores needs log2 P; score stores the next "
        "log2 P once both "
        "weigh warpgroups have loaded this one.",
        12,
        "dim",
    )
    pic.text(
        12,
        y + 18,
        "Violet: the weigh warpgroups meet when P of all heads is stored. Rare and not drawn: "
        "move_reference, before make_weights.",
        12,
        "dim",
    )


def wide_roles():
    pic = Picture(1180, 440, "Wide attention: who does what over time")
    pic.text(
        12,
        24,
        "One CTA: 64 heads of a token; a pair of blocks a, b of 64 rows each, and the next "
        "pair a′, b′",
        15,
        bold=True,
    )
    pic.text(
        12,
        43,
        "Products to scale (V3.2: 2,176 cycles of the tensor core a block); softmax and copies are "
        "schematic. A measured block takes 2,650 cycles.",
        12,
        "dim",
    )
    left, right = 176, 1165
    qk, pv = 1152, 1024
    end = 2 * (qk + pv) + qk + 300
    x = lambda cycles: left + (right - left) * cycles / end  # noqa: E731
    names = [
        ("copy", "4 warps, 56 regs (64 swept)"),
        ("warpgroup 0", "224 regs (216 swept)"),
        ("warpgroup 1", "224 regs (216 swept)"),
        ("tensor core", "takes both in turn"),
    ]
    tops = lanes(pic, names, 60, 66, left, right)

    def put(lane, a, b, kind, *lines, size=11, dashed=False, row=0, rows=1):
        h = 46 / rows
        pic.box(
            x(a),
            tops[lane] + 8 + row * h,
            x(b) - x(a) - 1,
            h,
            kind,
            *lines,
            size=size,
            dashed=dashed,
        )

    t1, t2, t3, t4 = qk, 2 * qk, 2 * qk + pv, 2 * (qk + pv)
    put(0, 0, 1000, "copy", "rest of b")
    put(0, 1000, t2 + 150, "wait", "buffers are full: addresses of a′", dashed=True)
    put(0, t2 + 150, t3 + 150, "copy", "a′, 16 rows as soon", "as they are free")
    put(0, t3 + 150, t4 + 250, "copy", "b′, 16 rows as soon", "as they are free")
    put(0, t4 + 250, end, "wait", "buffers are full", dashed=True)
    put(1, 0, t1, "score", "QKᵀ of a")
    put(1, t1, t1 + 600, "weigh2", "softmax a", "→ P of a")
    put(1, t1 + 600, t2, "wait", "until b", "is scored", dashed=True)
    put(1, t2, t3, "weigh", "P V of a, columns 0–255", "P from registers")
    put(1, t3, t4, "weigh", "P V of b, columns 0–255", "P from its tile")
    put(1, t4, end, "score", "QKᵀ of a′")
    put(2, 0, t1, "wait", "until a is scored", dashed=True)
    put(2, t1, t2, "score", "QKᵀ of b")
    put(2, t2, t3, "weigh", "P V of a, columns 256–511", row=0, rows=2)
    put(2, t2, t2 + 700, "weigh2", "softmax b → P of b", row=1, rows=2)
    put(2, t3, t4, "weigh", "P V of b, columns 256–511", "P from registers")
    put(2, t4, end, "wait", "until a′ is scored", dashed=True)
    put(3, 0, t1, "score", "QKᵀ a: 36 × 32 cycles")
    put(3, t1, t2, "score", "QKᵀ b: 36 × 32 cycles")
    put(3, t2, t3, "weigh", "P V of a: 8 × 128 cycles")
    put(3, t3, t4, "weigh", "P V of b: 8 × 128 cycles")
    put(3, t4, end, "score", "QKᵀ a′")
    for a, label in (
        (0, "0"),
        (t1, f"{t1:,}"),
        (t2, f"{t2:,}"),
        (t3, f"{t3:,}"),
        (t4, f"{t4:,} cycles"),
    ):
        y = tops[3] + 78
        pic.line([(x(a), tops[0] + 4), (x(a), y - 12)], "grid", dashed=True)
        pic.text(x(a), y + 2, label, 11, "dim", "start" if a == 0 else "middle")
    notes = [
        "Handed over: full[buffer][half] (rows are there) · scored[buffer] (its products "
        "have left the tensor core) · "
        "p_full[buffer] (P and references are stored)",
        "· empty[buffer][half][16 rows] (may be overwritten) · q_full, q_empty (a token's Q).",
        "Left columns of a buffer are free when warpgroup 0 has weighed them, right columns "
        "when warpgroup 1 has.",
    ]
    for i, note in enumerate(notes):
        pic.text(12, tops[3] + 106 + 18 * i, note, 12, "dim")
    return pic
