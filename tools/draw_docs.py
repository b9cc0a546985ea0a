#!/usr/bin/env python3
"""Draws the pictures of docs/ as SVG files in docs/pictures/.

    python3 tools/draw_docs.py            writes them
    python3 tools/draw_docs.py --check    says which of the stored files are not current

The sizes in the memory maps are computed from the constants of the kernels' layout headers and of
the cache records, so a changed constant makes --check fail. Needs nothing beyond Python.
"""

import argparse
import pathlib
import sys

from pictures import barriers, cpu, flow, helpers, layers, memory, one_token, ranks, roles

PICTURES = pathlib.Path(__file__).resolve().parent.parent / "docs" / "pictures"


DRAWINGS = {
    "flow-of-a-token.svg": one_token.flow_of_a_token,
    "decode-roles.svg": roles.decode_roles,
    "decode-barriers.svg": barriers.decode_barriers,
    "decode-memory.svg": memory.decode_shared,
    "decode-helpers.svg": helpers.decode_helpers,
    "prefill-roles.svg": roles.wide_roles,
    "prefill-memory.svg": memory.wide_shared,
    "plan-parts-tiles.svg": flow.plan_parts_tiles,
    "score-select.svg": flow.score_select,
    "cpu-attend.svg": cpu.attend_block,
    "layer-step.svg": layers.layer_step,
    "shares-of-ranks.svg": ranks.shares_of_ranks,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored files")
    args = parser.parse_args()
    stale = []
    for name, draw in DRAWINGS.items():
        text = draw().svg()
        path = PICTURES / name
        if args.check:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            PICTURES.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        print("Not current, run tools/draw_docs.py:", ", ".join(stale))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
