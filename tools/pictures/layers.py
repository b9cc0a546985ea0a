"""The step of an attention layer: projections, winnow's verbs, and what they store."""

from .picture import Picture

HEIGHT = 38
ROW = 62
HEADER = 18  # above the parts of a call that joins several verbs

# Columns, from left to right: x and width.
FIRST_GEMM = (132, 70)
NORM_WRITE = (220, 160)
SECOND_GEMM = (400, 82)
PREPARE = (502, 160)
STORED = (690, 106)
LISTED = (820, 86)
ATTEND = (926, 76)
OUTPUT = (1022, 106)


def layer_step():
    pic = Picture(1180, 796, "The step of an attention layer")
    pic.text(12, 24, "One step of a layer: from x to y", 15, bold=True)
    legend = [
        ("plain", "GEMM (torch)"),
        ("copy", "prepare and store"),
        ("look", "kept for later steps"),
        ("score", "choose"),
        ("weigh", "attend and output"),
    ]
    for i, (kind, text) in enumerate(legend):
        pic.box(468 + 142 * i, 8, 136, 24, kind, text, size=11)
    _mla(pic, 52)
    pic.line([(12, 428), (1168, 428)], "grid")
    _v4(pic, 444)
    return pic


def _rows(top, count):
    return [top + 14 + HEADER + ROW * i for i in range(count)]


def _right(column):
    return column[0] + column[1]


def _middle(y):
    return y + HEIGHT / 2


def _row(pic, y, name, *boxes):
    """Boxes (column, kind, lines...) of one row, each with an arrow from the one before."""
    pic.text(12, _middle(y) + 4, name, 12, "dim")
    before = None
    for column, kind, *lines in boxes:
        if kind is not None:
            pic.box(*_place(column, y), kind, *lines, size=11)
        if before is not None:
            pic.arrow((before, _middle(y)), (column[0], _middle(y)))
        before = _right(column)
    return before


def _place(column, y):
    x, width = column
    return x, y, width, HEIGHT


def _launch(pic, column, name, parts):
    """One call for parts (y, lines...) of several rows; _row() takes them without a kind."""
    x, width = column
    first, last = parts[0][0], parts[-1][0]
    pic.box(x, first - HEADER, width, last + HEIGHT - first + HEADER, "copy")
    pic.text(x + width / 2, first - 4, name, 11, anchor="middle", bold=True)
    for y, *lines in parts:
        for i, line in enumerate(lines):
            pic.text(
                x + width / 2,
                _middle(y) + 4 + 14 * (i - (len(lines) - 1) / 2),
                line,
                11,
                anchor="middle",
            )
        if y != last:
            edge = y + (ROW + HEIGHT) / 2
            pic.line([(x + 8, edge), (x + width - 8, edge)], dashed=True)


def _output(pic, y, first, last):
    """attend() over all rows, what follows it, and y."""
    x, width = ATTEND
    pic.box(x, y[0], width, y[-1] + HEIGHT - y[0], "weigh", "attend", size=13)
    pic.box(*_place(OUTPUT, y[0]), "weigh", *first, size=11)
    pic.box(*_place(OUTPUT, y[1]), "plain", *last, size=11)
    centre = OUTPUT[0] + OUTPUT[1] / 2
    pic.arrow((_right(ATTEND), _middle(y[0])), (OUTPUT[0], _middle(y[0])))
    pic.arrow((centre, y[0] + HEIGHT), (centre, y[1]))
    pic.arrow((_right(OUTPUT), _middle(y[1])), (1150, _middle(y[1])))
    pic.text(1156, _middle(y[1]) + 4, "y", 14, bold=True)


def _to_attend(pic, x, y, name=""):
    pic.arrow((x, _middle(y)), (ATTEND[0], _middle(y)))
    if name:
        pic.text(LISTED[0], _middle(y) - 6, name, 11, "dim")


def _turn(pic, x, y, row, column):
    """From the lower edge of a box to another row."""
    pic.arrow((x, y + HEIGHT), (x, _middle(row)), (column[0], _middle(row)))


def _mla(pic, top):
    pic.text(12, top + 6, "DeepSeek V3.2, GLM-5", 14, bold=True)
    y = latent, index_key, query, rope, index_query = _rows(top, 5)
    _launch(
        pic,
        NORM_WRITE,
        "norm_write",
        [
            (latent, "write:", "norm, RoPE, record"),
            (index_key, "write:", "LayerNorm, RoPE, record"),
            (query, "norm"),
        ],
    )
    _launch(
        pic,
        PREPARE,
        "prepare_queries",
        [(rope, "prepare_query: RoPE"), (index_query, "index_query:", "RoPE, e4m3, weights")],
    )
    pages = (STORED, "look", "pages of kv")
    end = _row(pic, latent, "latent key", (FIRST_GEMM, "plain", "kv_a"), (NORM_WRITE, None), pages)
    _to_attend(pic, end, latent)
    pages = (STORED, "look", "pages of index")
    _row(pic, index_key, "index key", (FIRST_GEMM, "plain", "wk"), (NORM_WRITE, None), pages)
    end = _row(
        pic,
        query,
        "query, latent part",
        (FIRST_GEMM, "plain", "q_a"),
        (NORM_WRITE, None),
        (SECOND_GEMM, "plain", "q_b"),
        (PREPARE, "copy", "absorb_query"),
    )
    _to_attend(pic, end, query, "q")
    _to_attend(pic, _row(pic, rope, "query, RoPE part", (PREPARE, None)), rope, "q_rope")
    end = _row(
        pic,
        index_query,
        "index query",
        (SECOND_GEMM, "plain", "wq_b,", "weights_proj"),
        (PREPARE, None),
        (STORED, "score", "score_select"),
        (LISTED, "score", "locate"),
    )
    _to_attend(pic, end, index_query)
    _turn(pic, 300, query, index_query, SECOND_GEMM)  # index queries come from the norm, too
    _turn(pic, 441, query, rope, PREPARE)
    pic.arrow((743, index_key + HEIGHT), (743, index_query))
    note = (
        "GLM's shared layers have no indexer: they call prepare_query alone, and take the slots "
        "that the last full layer chose."
    )
    pic.text(12, index_query + HEIGHT + 24, note, 11, "dim")
    _output(pic, y, ("project_output",), ("o_proj",))


def _v4(pic, top):
    pic.text(12, top + 6, "DeepSeek V4", 14, bold=True)
    y = window, query, index_query, index_key, entry = _rows(top, 5)
    _launch(
        pic,
        NORM_WRITE,
        "norm_write",
        [(window, "write:", "norm, RoPE, record"), (query, "norm")],
    )
    _launch(
        pic,
        PREPARE,
        "prepare_queries",
        [
            (query, "prepare_query:", "norm of each head, RoPE"),
            (index_query, "index_query:", "RoPE, e4m3, weights"),
        ],
    )
    end = _row(
        pic,
        window,
        "window",
        (FIRST_GEMM, "plain", "kv"),
        (NORM_WRITE, None),
        (STORED, "look", "pages: window"),
        (LISTED, "score", "window_lists"),
    )
    _to_attend(pic, end, window)
    end = _row(
        pic,
        query,
        "query",
        (FIRST_GEMM, "plain", "q_a"),
        (NORM_WRITE, None),
        (SECOND_GEMM, "plain", "q_b"),
        (PREPARE, None),
    )
    _to_attend(pic, end, query)
    _row(
        pic,
        index_query,
        "C4A: index query",
        (SECOND_GEMM, "plain", "q_b, weights"),
        (PREPARE, None),
        (STORED, "score", "score_select"),
    )
    _turn(pic, 300, query, index_query, SECOND_GEMM)
    compress = ("compress", "pool, norm, RoPE, record")
    rows = (FIRST_GEMM, "plain", "kv, gate", "in fp32")
    ring = (SECOND_GEMM, "look", "ring of rows")
    pages = (STORED, "look", "pages of index")
    _row(pic, index_key, "C4A: index key", rows, ring, (PREPARE, "copy", *compress), pages)
    end = _row(
        pic,
        entry,
        "C4A, C128A: entry",
        rows,
        ring,
        (PREPARE, "copy", *compress),
        (STORED, "look", "pages: entries"),
        (LISTED, "score", "locate, or", "c128a_lists"),
    )
    _to_attend(pic, end, entry)
    pic.arrow((743, index_key), (743, index_query + HEIGHT))
    chosen = LISTED[0] + LISTED[1] / 2
    pic.arrow(
        (_right(STORED), _middle(index_query)), (chosen, _middle(index_query)), (chosen, entry)
    )
    note = "Layers without an indexer (C128A, window alone) call prepare_query alone."
    pic.text(12, entry + HEIGHT + 24, note, 11, "dim")
    _output(pic, y, ("rotate", "inverse"), ("o_a groups,", "o_b"))
