"""What the x86 kernels of attend do with a block of keys, and where their time goes."""

from .picture import Picture, lanes


def attend_block():
    pic = Picture(1180, 500, "Attention on x86: a block of keys")
    pic.text(12, 24, "One block of keys: from the cache to the output", 15, bold=True)
    pic.text(190, 52, "once for all heads", 12, "dim")
    pic.text(742, 52, "for 16 or 32 heads at a time", 12, "dim")

    pic.box(12, 110, 130, 56, "plain", "cache", "656 B a record")
    pic.box(190, 110, 140, 56, "copy", "gather", "8 entries at once,", "holes dropped", size=11)
    pic.box(376, 110, 120, 56, "copy", "decode e4m3,", "pack")
    pic.box(544, 66, 150, 50, "look", "K as rows", "L2, 135 KB")
    pic.box(544, 160, 150, 50, "look", "V as key pairs", "L2, 120 KB")
    pic.box(742, 66, 130, 50, "score", "scores", "Sᵀ = K · Qᵀ")
    pic.box(906, 66, 120, 50, "meet", "softmax", "m, e^(s − m)")
    pic.box(906, 160, 120, 50, "weigh", "values", "O += Pᵀ · V")
    pic.box(1070, 160, 98, 50, "plain", "O", "L2, 264 KB")
    pic.arrow((142, 138), (188, 138))
    pic.arrow((330, 138), (374, 138))
    pic.arrow((496, 138), (520, 138), (520, 91), (542, 91))
    pic.arrow((520, 138), (520, 185), (542, 185))
    pic.arrow((694, 91), (740, 91))
    pic.arrow((872, 91), (904, 91))
    pic.arrow((966, 116), (966, 158))
    pic.text(974, 141, "P in bf16, L1", 11, "dim")
    pic.arrow((694, 185), (904, 185))
    pic.arrow((1026, 185), (1068, 185))
    pic.text(742, 134, "a panel of Q and K in L1", 11, "dim")
    pic.text(544, 228, "sizes: block of 120 keys, 128 heads, VDPBF16PS", 11, "dim")

    pic.text(12, 272, "Where the time of a key goes, 128 heads, to scale", 15, bold=True)
    names = [("avx512bf16", "Zen 4, cycles by budget"), ("amx", "TSC ticks, measured at 68e2a16")]
    left, right = 230, 1168
    tops = lanes(pic, names, 286, 104, left, right)
    shares = [
        [
            (118, "copy", ""),
            (2304, "score", "scores 2,304"),
            (368, "meet", "softmax", "368"),
            (2048, "weigh", "values 2,048"),
        ],
        [
            (28, "plain", ""),
            (149, "copy", "pack 149"),
            (258, "score", "scores and logits 258"),
            (84, "meet", "e^x 84"),
            (165, "weigh", "values 165"),
            (22, "plain", ""),
        ],
    ]
    fetch = {0: ("score", "next block's records are fetched to L2"), 1: ("meet", "next block: L2")}
    notes = {0: "first: pack 118", 1: "first: entries and Q 28; last: O in order 22"}
    for lane, (top, row) in enumerate(zip(tops, shares, strict=True)):
        scale = (right - left) / sum(share[0] for share in row)
        x = left
        for amount, kind, *words in row:
            width = amount * scale
            lines = [word for word in words if word]
            pic.box(x, top + 8, width - 1, 40, kind, *lines)
            if kind == fetch[lane][0]:
                pic.box(x, top + 52, width - 1, 20, "wait", fetch[lane][1], size=11, dashed=True)
            x += width
        pic.text(left, top + 90, notes[lane], 11, "dim")
    return pic
