"""The step of an attention layer: projections, winnow's verbs, and what they store."""

from .picture import Picture

HEIGHT = 38
ROW = 58


def layer_step():
    pic = Picture(1180, 640, "The step of an attention layer")
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
    pic.line([(12, 330), (1168, 330)], "grid")
    _v4(pic, 344)
    return pic


def _row(pic, y, name, boxes):
    """Boxes (x, width, kind, lines...) of one row, each with an arrow from the one before."""
    pic.text(12, y + HEIGHT / 2 + 4, name, 12, "dim")
    before = None
    for x, width, kind, *lines in boxes:
        pic.box(x, y, width, HEIGHT, kind, *lines, size=11)
        if before is not None:
            pic.arrow((before, y + HEIGHT / 2), (x, y + HEIGHT / 2))
        before = x + width


def _output(pic, y, first, last):
    """attend(), what follows it, and y."""
    pic.box(916, y, 76, 3 * ROW + HEIGHT, "weigh", "attend", size=13)
    pic.box(1012, y, 106, HEIGHT, "weigh", *first, size=11)
    pic.box(1012, y + ROW, 106, HEIGHT, "plain", *last, size=11)
    pic.arrow((992, y + HEIGHT / 2), (1012, y + HEIGHT / 2))
    pic.arrow((1065, y + HEIGHT), (1065, y + ROW))
    pic.arrow((1118, y + ROW + HEIGHT / 2), (1146, y + ROW + HEIGHT / 2))
    pic.text(1152, y + ROW + HEIGHT / 2 + 4, "y", 14, bold=True)


def _mla(pic, top):
    pic.text(12, top + 6, "DeepSeek V3.2, GLM-5", 14, bold=True)
    y = [top + 20 + ROW * i for i in range(4)]
    middle = HEIGHT / 2
    query = [
        (132, 80, "plain", "q_a"),
        (226, 70, "copy", "norm"),
        (312, 90, "plain", "q_b"),
        (418, 200, "copy", "absorb_query", "prepare_query: RoPE"),
    ]
    _row(pic, y[0], "query", query)
    pic.arrow((618, y[0] + middle), (916, y[0] + middle))
    pic.text(690, y[0] + middle - 6, "q, q_rope", 11, "dim")
    keys = [
        (132, 80, "plain", "kv_a"),
        (418, 200, "copy", "write", "norm, RoPE, record"),
        (650, 110, "look", "pages of kv"),
    ]
    _row(pic, y[1], "latent key", keys)
    pic.arrow((760, y[1] + middle), (916, y[1] + middle))
    chosen = [
        (312, 90, "plain", "wq_b,", "weights_proj"),
        (418, 200, "copy", "index_query", "RoPE, e4m3, weights"),
        (650, 110, "score", "score_select"),
        (792, 90, "score", "locate"),
    ]
    _row(pic, y[2], "index query", chosen)
    pic.arrow((882, y[2] + middle), (916, y[2] + middle))
    # The indexer's queries come from the normalised q_a as well.
    pic.arrow((261, y[0] + HEIGHT), (261, y[2] + middle), (312, y[2] + middle))
    index_keys = [
        (132, 80, "plain", "wk"),
        (418, 200, "copy", "write", "LayerNorm, RoPE, record"),
        (650, 110, "look", "pages of index"),
    ]
    _row(pic, y[3], "index key", index_keys)
    pic.arrow((705, y[3]), (705, y[2] + HEIGHT))
    note = (
        "GLM's shared layers have no indexer: they take the slots that the last full layer chose."
    )
    pic.text(12, y[3] + HEIGHT + 22, note, 11, "dim")
    _output(pic, y[0], ("project_output",), ("o_proj",))


def _v4(pic, top):
    pic.text(12, top + 6, "DeepSeek V4", 14, bold=True)
    y = [top + 20 + ROW * i for i in range(5)]
    middle = HEIGHT / 2
    query = [
        (132, 80, "plain", "q_a"),
        (226, 70, "copy", "norm"),
        (312, 90, "plain", "q_b"),
        (418, 200, "copy", "prepare_query", "norm of each head, RoPE"),
    ]
    _row(pic, y[0], "query", query)
    pic.arrow((618, y[0] + middle), (916, y[0] + middle))
    window = [
        (132, 80, "plain", "kv"),
        (418, 200, "copy", "write", "norm, RoPE, record"),
        (650, 110, "look", "pages: window"),
        (792, 90, "score", "window_lists"),
    ]
    _row(pic, y[1], "window", window)
    pic.arrow((882, y[1] + middle), (916, y[1] + middle))
    entries = [
        (132, 80, "plain", "kv, gate", "in fp32"),
        (418, 200, "copy", "compress", "pool, norm, RoPE, record"),
        (650, 110, "look", "pages: entries"),
        (792, 90, "score", "locate, or", "c128a_lists"),
    ]
    _row(pic, y[2], "C4A, C128A: entry", entries)
    pic.arrow((882, y[2] + middle), (916, y[2] + middle))
    chosen = [
        (312, 90, "plain", "q_b, weights"),
        (418, 200, "copy", "index_query", "RoPE, e4m3, weights"),
        (650, 110, "score", "score_select"),
    ]
    _row(pic, y[3], "C4A: index query", chosen)
    pic.arrow((261, y[0] + HEIGHT), (261, y[3] + middle), (312, y[3] + middle))
    pic.arrow((760, y[3] + middle), (837, y[3] + middle), (837, y[2] + HEIGHT))
    index_entries = [
        (132, 80, "plain", "kv, gate", "in fp32"),
        (418, 200, "copy", "compress", "pool, norm, RoPE, record"),
        (650, 110, "look", "pages of index"),
    ]
    _row(pic, y[4], "C4A: index key", index_entries)
    pic.arrow((705, y[4]), (705, y[3] + HEIGHT))
    pic.box(312, y[2], 82, HEIGHT, "look", "ring of rows", size=10)
    pic.arrow((394, y[2] + middle), (418, y[2] + middle))
    pic.box(312, y[4], 82, HEIGHT, "look", "ring of rows", size=10)
    _output(pic, y[0], ("rotate", "inverse"), ("o_a groups,", "o_b"))
