"""Which CTA of the decode kernel takes which blocks, where tokens are helped."""

from .picture import Picture

# 24 tokens of 128 heads and 32 blocks on 66 pairs of CTAs, as cut.cpp cuts them.
BLOCKS, MAIN_BLOCKS, HELPER_BLOCKS = 32, 13, 8
REST = BLOCKS - 2 * MAIN_BLOCKS
SHOWN = 4
KINDS = ["copy", "score", "weigh", "meet"]


def decode_helpers():
    pic = Picture(1080, 470, "Tokens whose CTAs are helped by others")
    pic.text(
        12,
        24,
        "24 tokens of 128 heads on 132 multiprocessors: 24 × 2 mains and 18 helpers, each a pair "
        "of CTAs",
        15,
        bold=True,
    )
    pic.text(
        12,
        43,
        "A box is a part of a token's 32 blocks of 64 rows. Four tokens and their three helpers "
        "are shown; the pattern goes on.",
        12,
        "dim",
    )
    left, block = 130, 17
    places = []
    for token in range(SHOWN):
        y = 66 + 40 * token
        pic.text(12, y + 21, f"token {token}", 13, bold=True)
        x = left
        for main in range(2):
            width = MAIN_BLOCKS * block
            pic.box(
                x,
                y,
                width - 3,
                32,
                KINDS[token],
                f"main {2 * token + main}: {MAIN_BLOCKS} blocks",
                size=12,
            )
            x += width
        pic.box(x, y, REST * block - 3, 32, KINDS[token], f"rest: {REST}", size=12, dashed=True)
        places.append((x + REST * block - 3, y + 16))
    # Rests, one after the other, dealt out evenly.
    right = 770
    for helper in range(3):
        y = 66 + 44 * helper
        pic.text(right, y + 21, f"helper {helper}", 13, bold=True)
        x = right + 76
        begin, end = helper * HELPER_BLOCKS, (helper + 1) * HELPER_BLOCKS
        for token in range(SHOWN):
            first = max(begin, token * REST)
            last = min(end, (token + 1) * REST)
            if first < last:
                width = (last - first) * (block + 6)
                name = f"{last - first} of t{token}"
                pic.box(x, y, width - 3, 32, KINDS[token], name, size=10)
                x += width
    for x, y in places:
        pic.line([(x, y), (x + 30, y)])
    middle = (places[0][1] + places[-1][1]) / 2
    pic.line([(places[0][0] + 30, places[0][1]), (places[-1][0] + 30, places[-1][1])])
    pic.arrow((places[0][0] + 30, middle), (right - 8, middle))
    # Over time.
    top = 262
    pic.text(12, top, "Over time", 14, bold=True)
    pic.text(100, top, "schematic; sums go to the workspace in bf16", 12, "dim")
    scale = 17

    def put(x, y, width, kind, *lines, dashed=False):
        pic.box(x, y, width - 3, 40, kind, *lines, size=11, dashed=dashed)
        return x + width

    start = 64
    rows = [top + 18 + 52 * i for i in range(3)]
    for y, name in zip(rows, ("helper 1", "main 2", "main 3"), strict=True):
        pic.text(12, y + 25, name, 13, bold=True)
    x = put(left, rows[0], start, "plain", "start")
    x = put(x, rows[0], 4 * scale + 18, KINDS[1], "4 blocks", "of token 1")
    flag = put(x, rows[0], 76, "look", "store sums,", "set the flag")
    x = put(flag, rows[0], 4 * scale + 18, KINDS[2], "4 blocks", "of token 2")
    put(x, rows[0], 76, "look", "store sums,", "set the flag")
    for y, output in zip(rows[1:], ("write the output, lse", "write the output"), strict=True):
        x = put(left, y, start, "plain", "start")
        x = put(x, y, MAIN_BLOCKS * (scale + 7), KINDS[1], f"{MAIN_BLOCKS} blocks of token 1")
        ends = x
        x = put(x, y, 164, "look", "store the other main's", "256 columns, set the flag")
        x = put(x, y, 130, "copy", "bulk copies of the", "others' sums")
        put(x, y, 170, "weigh2", "add up own 256 columns,", output)
    # A copy of the helper's sums may come over Q before the last blocks are done.
    pic.arrow((flag - 40, rows[0] + 40), (flag - 40, rows[1]))
    pic.line([(ends, rows[1] - 4), (ends, rows[2] + 44)], "grid")
    pic.text(
        12,
        rows[2] + 68,
        "The score warpgroup of a main waits for the flags, while its weigh warpgroups are still "
        "at the last blocks. Helpers wait for nobody.",
        12,
        "dim",
    )
    return pic
