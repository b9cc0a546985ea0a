"""What each of four ranks holds and computes in the ways of sharing out a layer."""

from .picture import Picture

RANKS = 4
CELL = 15
WIDTH = 272
ROW = 46

# A title, what it says below, which of eight heads, tokens and positions rank r has, what travels.
WAYS = [
    (
        "Spread::kHeads",
        "tensor parallelism",
        lambda r, i: i // 2 == r,
        lambda r, i: True,
        lambda r, i: True,
        ("the chosen ids, or", "candidates for the top-k"),
    ),
    (
        "Spread::kContext",
        "decode, caches too large for one rank",
        lambda r, i: True,
        lambda r, i: True,
        lambda r, i: i % RANKS == r,
        ("candidates for the top-k,", "then parts of every head's output"),
    ),
    (
        "Spread::kQueries",
        "prefill",
        lambda r, i: True,
        lambda r, i: i % RANKS == r,
        lambda r, i: True,
        ("the new tokens' records", ""),
    ),
    (
        "Spread::kQueries, sharded",
        "prefill over the caches of kContext",
        lambda r, i: True,
        lambda r, i: i % RANKS == r,
        lambda r, i: i % RANKS == r,
        ("new records, and for each layer", "the records of the whole prefix"),
    ),
]
GROUPS = [("heads", "score"), ("tokens", "weigh"), ("cache", "copy")]


def shares_of_ranks():
    pic = Picture(1180, 348, "What each rank holds and computes")
    pic.text(12, 24, "What each of four ranks holds and computes", 15, bold=True)
    for i, (kind, note) in enumerate(
        [
            ("score", "heads that it attends with"),
            ("weigh", "query tokens"),
            ("copy", "positions in its caches (interleave 1)"),
            ("wait", "of other ranks"),
        ]
    ):
        x = 420 + [0, 200, 330, 610][i]
        pic.box(x, 12, 14, 14, kind)
        pic.text(x + 20, 24, note, 12, "dim")
    for n, way in enumerate(WAYS):
        _way(pic, 12 + n * 294, way)
    return pic


def _way(pic, left, way):
    title, note, *has, travels = way
    pic.text(left, 62, title, 14, bold=True)
    pic.text(left, 79, note, 12, "dim")
    starts = [left + 46 + g * 76 for g in range(3)]
    for (name, _), x in zip(GROUPS, starts, strict=True):
        pic.text(x, 100, name, 11, "dim")
    for rank in range(RANKS):
        y = 108 + rank * ROW
        pic.text(left, y + 20, f"rank {rank}", 11, "dim")
        for (_, kind), share, x in zip(GROUPS, has, starts, strict=True):
            for i in range(8):
                mine = share(rank, i)
                place = (x + i % 4 * CELL, y + i // 4 * CELL)
                pic.box(*place, CELL - 2, CELL - 2, kind if mine else "wait")
    pic.line([(left, 300), (left + WIDTH, 300)], "grid")
    pic.text(left, 318, "travels: " + travels[0], 12)
    if travels[1]:
        pic.text(left + 52, 335, travels[1], 12)
