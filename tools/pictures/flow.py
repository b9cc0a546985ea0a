"""How a batch becomes calls and tiles, and what score_select does over time."""

from .picture import Picture, lanes


def plan_parts_tiles():
    pic = Picture(1180, 600, "Plan, parts, tiles")
    pic.text(
        12, 24, "A batch becomes parts (attend() calls), and a part becomes tiles", 15, bold=True
    )
    left = 190
    # The batch.
    pic.text(12, 72, "batch", 14, bold=True)
    pic.text(12, 90, "new tokens of the context", 12, "dim")
    requests = [
        ("d0", 26, "copy", "1"),
        ("d1", 26, "copy", "1"),
        ("d2", 26, "copy", "1"),
        ("d3", 26, "copy", "1"),
        ("p0: 20 of 4k", 130, "copy", ""),
        ("p1: 900 of 16k", 230, "weigh", ""),
        ("p2: 600 of 8k", 180, "weigh", ""),
        ("p3: 2,000 of 2k", 310, "score", ""),
    ]
    x = left
    edges = [x]
    for name, w, kind, _ in requests:
        pic.box(x, 58, w - 3, 38, kind, name, size=11 if w > 30 else 10)
        x += w
        edges.append(x)
    pic.text(left, 114, "decodes", 12, "dim")
    pic.text(
        edges[4],
        114,
        "prefills: each asks prefill_route() for its route (plan/route.cpp)",
        12,
        "dim",
    )
    # Parts.
    pic.text(12, 172, "parts", 14, bold=True)
    pic.text(12, 190, "plan.parts()", 12, "dim")
    parts = [
        (0, 5, "copy", "part 0", "decodes and direct prefills"),
        (5, 7, "weigh", "part 1: gathered chunk", "gather() → bf16 rows → attend()"),
        (7, 8, "score", "part 2: per head (mha)", "gather(), decompress(), attend_mha()"),
    ]
    for a, b, kind, first, second in parts:
        pic.box(edges[a], 152, edges[b] - edges[a] - 3, 50, kind, first, second, size=12)
        middle = (edges[a] + edges[b]) / 2
        pic.arrow((middle, 120 if a else 120), (middle, 150))
    pic.text(left, 222, "read the pages as they are", 12, "dim")
    pic.text(
        edges[5],
        222,
        "consecutive prefills that take one route; their sequences fit the workspace",
        12,
        "dim",
    )
    # Tiles on the CPU.
    pic.text(12, 272, "tiles, CPU", 14, bold=True)
    pic.text(12, 290, "plan.schedule(part)", 12, "dim")
    pic.text(
        left,
        258,
        "five tokens with lists of 2,048 positions, four workers, balanced: cuts at "
        "multiples of 64; a cut "
        "token is merged in split order",
        12,
        "dim",
    )
    tiles = [
        (0, 0, 2048, 0),
        (1, 0, 512, 0),
        (1, 512, 2048, 1),
        (2, 0, 1024, 1),
        (2, 1024, 2048, 2),
        (3, 0, 1536, 2),
        (3, 1536, 2048, 3),
        (4, 0, 2048, 3),
    ]
    kinds = ["copy", "score", "weigh", "meet"]
    for token, begin, stop, worker in tiles:
        width, y = 190, 272
        x = left + token * (width + 4)
        a, b = x + begin * width / 2048, x + stop * width / 2048
        pic.box(
            a,
            y,
            b - a - 1,
            34,
            kinds[worker],
            f"worker {worker}" if stop - begin > 800 else f"w{worker}",
            size=11,
        )
        if begin == 0:
            pic.text(x, y + 50, f"token {token}", 11, "dim")
    # CTAs on Hopper.
    pic.text(12, 382, "CTAs, Hopper", 14, bold=True)
    pic.text(12, 400, "decode_sm90/cut.cpp", 12, "dim")
    pic.text(
        left,
        366,
        "the launcher cuts by a cost model, for the whole call: groups of heads × splits of "
        "the list, and a last, "
        "uneven wave goes in splits of its own",
        12,
        "dim",
    )
    for g in range(2):
        y = 380 + g * 42
        pic.text(left, y + 22, f"token t, heads {64 * g}–{64 * g + 63}", 12)
        for s in range(4):
            pic.box(
                left + 170 + s * 128,
                y,
                122,
                34,
                ["copy", "score", "weigh", "meet"][s],
                f"CTA: split {s}",
                size=11,
            )
    pic.text(left + 170, 480, "8 blocks of 64 rows", 11, "dim")
    pic.line([(left + 170, 466), (left + 292, 466)])
    pic.text(left + 170 + 4 * 128 + 14, 402, "splits merge inside the launch:", 12, "dim")
    pic.text(left + 170 + 4 * 128 + 14, 420, "through a cluster's shared memory", 12, "dim")
    pic.text(left + 170 + 4 * 128 + 14, 438, "or through the workspace", 12, "dim")
    notes = [
        "A plan is made once for a capacity. refill() lays out parts and schedules for each "
        "batch; it allocates nothing.",
        "With a fixed split, tiles end at multiples of split_size and all prefills take one "
        "route, so that a token's bits do "
        "not depend on its batch.",
        "On Hopper a part's bf16 rows go to the wide kernel where tokens are many "
        "(docs/prefill-sm90.md).",
    ]
    for i, note in enumerate(notes):
        pic.text(12, 522 + 20 * i, note, 12, "dim")
    return pic


def score_select():
    pic = Picture(1180, 480, "score_select of one token over 32k keys")
    pic.text(
        12, 24, "score_select of one token over 32k keys: the two launches overlap", 15, bold=True
    )
    pic.text(
        12,
        43,
        "Schematic, from time stamps in cycles (H200, 2026-11-15). A score block has one "
        "token and a chunk of keys; "
        "a cluster of 8 select blocks has the row of logits.",
        12,
        "dim",
    )
    left, right = 176, 1165
    names = [
        ("score: producer", "one warp"),
        ("score: look-up", "one warp"),
        ("score: consumers", "2 warpgroups, in turn"),
        ("select: 8 blocks", "a cluster, 512 threads each"),
    ]
    end = 14200
    x = lambda cycles: left + (right - left) * cycles / end  # noqa: E731
    tops = lanes(pic, names, 62, 66, left, right)

    def put(lane, a, b, kind, *lines, size=11, dashed=False):
        pic.box(x(a), tops[lane] + 10, x(b) - x(a) - 1, 42, kind, *lines, size=size, dashed=dashed)

    put(0, 0, 2600, "look", "guess the request:", "its pages")
    put(0, 2600, 6000, "copy", "bulk copies of tiles of 64 keys,", "6 stages")
    put(1, 0, 2400, "look", "range, request")
    put(2, 0, 2600, "plain", "queries, weights")
    put(2, 2600, 4400, "wait", "dry run of", "the code")
    put(2, 4400, 6200, "score", "products, ReLU,", "sum over heads")
    put(
        3,
        0,
        6500,
        "wait",
        "may start early: barriers, range",
        "then waits for the logits",
        dashed=True,
    )
    steps = [
        ("load, range", "of a sample", 2000),
        ("", "", 0),
        ("count", "", 600),
        ("send", "", 1000),
        ("find", "bin", 750),
        ("entries", "", 750),
        ("send", "", 1000),
        ("rank", "", 500),
        ("ids", "", 800),
    ]
    at = 6500
    for first, second, cycles in steps:
        if not cycles:
            continue
        kind = "meet" if first == "send" else "weigh"
        lines = [t for t in (first, second) if t]
        put(3, at, at + cycles, kind, *lines, size=10 if cycles < 900 else 11)
        at += cycles
    pic.arrow((x(6200), tops[2] + 31), (x(6350), tops[2] + 31), (x(6350), tops[3] + 10))
    y = tops[3] + 98
    pic.text(12, y, "Which form of select serves a call (cuda/topk.cu)", 14, bold=True)
    forms = [
        ("few rows that fit a cluster's registers", "shared row: counts, then entries sent"),
        ("few rows that do not", "stream: list what reaches a bar, once"),
        ("many long rows", "filter: one block a row, one pass"),
        ("short rows, and whatever the forms miss", "exact: three rounds of digit counting"),
    ]
    for i, (when, what) in enumerate(forms):
        column, row = i % 2, i // 2
        pic.box(12 + column * 584, y + 14 + row * 44, 264, 34, "plain", when, size=12)
        pic.arrow((276 + column * 584, y + 31 + row * 44), (298 + column * 584, y + 31 + row * 44))
        pic.box(298 + column * 584, y + 14 + row * 44, 280, 34, "weigh2", what, size=12)
    return pic
