"""Which barrier hands what from role to role in decode's attend kernel on Hopper."""

from .picture import Picture


def decode_barriers():
    pic = Picture(1080, 296, "Decode: who hands what to whom")
    pic.text(
        12,
        24,
        "A block's way through a CTA: what is handed on, and the mbarrier that says so "
        "(layout.cuh: BarrierTable)",
        15,
        bold=True,
    )
    roles = [
        ("look", "find rows", "where rows are"),
        ("copy", "copy", "stages of rows"),
        ("look", "describe", "λ, scales"),
        ("score", "score", "log2 P"),
        ("weigh", "weigh", "P, then O"),
    ]
    handed = [
        ("places_found", "place"),
        ("stage_full", "ring, side, valid"),
        ("block_ready", "row_lambda, scales"),
        ("log2_p_full", "log2_p, outgrown"),
    ]
    wide, gap, high, top = 110, 122, 50, 50
    left = [21 + i * (wide + gap) for i in range(len(roles))]
    middle = [x + wide / 2 for x in left]
    for x, (kind, name, what) in zip(left, roles, strict=True):
        pic.box(x, top, wide, high, kind, name, what)
    for x, (barrier, what) in zip(left, handed, strict=False):
        pic.arrow((x + wide, top + high / 2), (x + wide + gap, top + high / 2))
        pic.text(x + wide + gap / 2, top + high / 2 - 7, barrier, 12, anchor="middle", bold=True)
        pic.text(x + wide + gap / 2, top + high / 2 + 16, what, 11, "dim", "middle")

    def back(source, target, depth, label, barrier, what):
        """An arrow below the boxes, to a role before; `label`: where its names begin."""
        bottom, y = top + high, top + high + depth
        x0, x1 = middle[source] - 14 + depth / 5, middle[target] + 14 - depth / 5
        pic.arrow((x0, bottom), (x0, y), (x1, y), (x1, bottom))
        pic.text(label, y - 6, barrier, 12, bold=True)
        pic.text(label, y + 15, what, 11, "dim")

    back(4, 3, 44, 808, "log2_p_empty", "log2_p is read; reference is set")
    back(4, 1, 94, 560, "stage_empty", "the stage's 16 rows are read")
    back(2, 0, 44, 100, "block_ready", "this block's places are read")
    notes = [
        "The weigh warpgroups also wait for each other: at the named barrier kWeighing, when P of "
        "all heads is stored, and at p_empty, when both have",
        "multiplied by it. No other wait is in the loop of blocks, so a role may be ahead of the "
        "next one as far as the memory between them reaches:",
        "three blocks of places, the ring's stages, one block of log2 P. Where a CTA has several "
        "tokens, blocks and phases are counted over all of them.",
    ]
    for i, line in enumerate(notes):
        pic.text(12, top + 184 + 18 * i, line, 12, "dim")
    return pic
