"""One decode token's way through the flow: from logits to the records that it attends to."""

from .picture import Picture

CELL, PAGE, PAGES = 40, 4, 4
LEFT = 200
LOGITS = [22, 46, 12, 18, 30, 8, 52, 26, 16, 40, 20]
BLOCK_TABLE = [2, 0, 3]
TOP_K = 3


def flow_of_a_token():
    """A request of eleven tokens in pages of four; the example computes what the verbs would."""
    chosen = sorted(sorted(range(len(LOGITS)), key=lambda i: -LOGITS[i])[:TOP_K])
    slots = [BLOCK_TABLE[i // PAGE] * PAGE + i % PAGE for i in chosen]
    pic = Picture(1060, 480, "One decode token: from logits to the records it attends to")
    pic.text(12, 24, "One decode token: from logits to the records it attends to", 15, bold=True)
    pic.text(
        12,
        43,
        "A request of 11 tokens, pages of 4 tokens, a top-k of 3. In V3.2 pages have 64 tokens "
        "and the top-k is 2,048.",
        12,
        "dim",
    )
    _scores(pic, chosen)
    _table(pic, chosen)
    _pages(pic, chosen, slots)
    _output(pic, chosen, slots)
    return pic


def _verb(pic, y, name, note):
    pic.text(12, y, name, 14, bold=True)
    pic.text(12, y + 17, note, 12, "dim")


def _scores(pic, chosen):
    _verb(pic, 92, "score", "a logit for each token")
    _verb(pic, 146, "select", f"the {TOP_K} largest: logical ids")
    for i, logit in enumerate(LOGITS):
        kind = "score" if i in chosen else "wait"
        x = LEFT + i * CELL
        pic.box(x + 7, 124 - logit, CELL - 14, logit, kind)
        pic.box(x, 128, CELL - 3, 30, kind, str(i))
    ids = ", ".join(map(str, chosen))
    pic.text(LEFT + len(LOGITS) * CELL + 24, 148, f"ids = [{ids}], ascending", 13)


def _table(pic, chosen):
    _verb(pic, 214, "locate", "id → slot, by the block table")
    for i, page in enumerate(BLOCK_TABLE):
        x = LEFT + i * PAGE * CELL
        width = min(PAGE, len(LOGITS) - i * PAGE) * CELL - 3
        pic.box(x, 196, width, 30, "look", f"page {page}")
    for i in chosen:
        x = LEFT + i * CELL + CELL / 2
        pic.arrow((x, 158), (x, 196))
    pic.text(
        LEFT + len(LOGITS) * CELL + 24,
        216,
        f"slot = block_table[id / {PAGE}] · {PAGE} + id mod {PAGE}",
        13,
    )


def _slot_x(slot):
    return LEFT + slot * CELL + slot // PAGE * 14


def _pages(pic, chosen, slots):
    _verb(pic, 326, "cache", "records in pages, by slot")
    of_the_request = {BLOCK_TABLE[i // PAGE] * PAGE + i % PAGE for i in range(len(LOGITS))}
    for slot in range(PAGE * PAGES):
        kind = "weigh" if slot in slots else "copy" if slot in of_the_request else "wait"
        pic.box(_slot_x(slot), 308, CELL - 3, 34, kind, str(slot), dashed=kind == "wait")
    for page in range(PAGES):
        pic.text(_slot_x(page * PAGE), 360, f"page {page}", 12, "dim")
    heights = [244, 258, 272]
    for i, slot, bend in zip(chosen, slots, heights, strict=True):
        x, to = LEFT + i * CELL + CELL / 2, _slot_x(slot) + CELL / 2
        pic.arrow((x, 226), (x, bend), (to, bend), (to, 308))


def _output(pic, chosen, slots):
    _verb(pic, 414, "attend", "these records, every head")
    top = 396
    pic.box(LEFT, top, 330, 40, "weigh", "s = scale · q · K,  out = softmax(s) · V", size=13)
    pic.text(
        LEFT + 346,
        top + 24,
        f"slots = {slots}: in the order of the ids; −1 means no entry",
        13,
    )
    for slot in slots:
        x = _slot_x(slot) + CELL / 2
        pic.line([(x, 342), (x, 372)])
    xs = [_slot_x(slot) + CELL / 2 for slot in slots]
    pic.line([(min(xs), 372), (max(xs), 372)])
    pic.arrow((LEFT + 200, 372), (LEFT + 200, top))
    notes = [
        ("score", "chosen"),
        ("weigh", "chosen, as a record"),
        ("copy", "other records of the request"),
        ("wait", "not chosen, or of other requests"),
    ]
    x = LEFT
    for kind, note in notes:
        pic.box(x, 454, 14, 14, kind)
        pic.text(x + 20, 466, note, 12, "dim")
        x += 60 + 7 * len(note)
