#!/usr/bin/env python3
"""Draws what `winnow bench` stored: the share of the roof that each case reaches, and the speed-up
over a peer where one is known.

    tools/plot_bench.py bench/results/NAME.json -o NAME.svg             (or .png)
    tools/plot_bench.py A.json B.json --only 'attend .* h128' -o AB.png

Takes `--save` files (header and results) and the bare rows of `--json`; each file is a row of the
figure. `--only` is a regular expression over "stage case kernel". Needs matplotlib.
"""

import argparse
import json
import pathlib
import re
import sys

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch
except ImportError:
    sys.exit("plot_bench needs matplotlib: pip install matplotlib")

FIELDS = {"roof_share": "share of the roof", "ratio": "speed-up: the peer's time / winnow's time"}

# One colour a stage, the same in every file. Stages that are not listed share grey.
COLOURS = {
    "attend": "#1f77b4",
    "score": "#9467bd",
    "select": "#ff7f0e",
    "write": "#2ca02c",
    "locate": "#8c564b",
    "mha": "#17becf",
    "absorb": "#e377c2",
    "plan": "#bcbd22",
    "lists": "#d62728",
    "merge": "#393b79",
    "mask": "#637939",
    "norm": "#aec7e8",
    "rotate": "#ffbb78",
    "prepare_query": "#98df8a",
    "index_query": "#c5b0d5",
    "compress": "#ff9896",
    "norm_write": "#5254a3",
    "prepare_queries": "#8ca252",
}
OTHER = "#7f7f7f"

# A figure with more bars than this per file is a strip that no screen shows.
MOST_ROWS = 60


def read(path):
    """(title, rows) of a file."""
    stored = json.loads(pathlib.Path(path).read_text())
    if isinstance(stored, list):
        return pathlib.Path(path).stem, stored
    if "results" not in stored:
        sys.exit(f"plot_bench: {path}: no rows of `winnow bench --save` in this file")
    header = stored["header"]
    machine = header.get("gpu") or header["cpu"]
    return f"{machine}, winnow {header['version']} ({header['commit']})", stored["results"]


def name_of(row):
    return " ".join(row[key] for key in ("stage", "case", "kernel") if row.get(key))


def chosen(path, only, most):
    """(title, rows) of a file: the rows that match `only`, the first `most` of them."""
    title, rows = read(path)
    found = [row for row in rows if re.search(only, name_of(row))]
    if not found:
        sys.exit(f"plot_bench: {path}: no row of {len(rows)} matches {only!r}")
    if len(found) > most:
        print(f"{path}: {most} of {len(found)} rows drawn; choose with --only, or raise --most")
    return title, found[:most]


def draw(axis, rows, field):
    """Horizontal bars of the rows that have the field, a colour per stage; a line at 1."""
    places = [i for i, row in enumerate(rows) if isinstance(row.get(field), (int, float))]
    values = [rows[i][field] for i in places]
    colours = [COLOURS.get(rows[i]["stage"], OTHER) for i in places]
    labels = [f"{value:.0%}" for value in values]
    if field == "ratio":
        labels = [f"{rows[i]['ratio']:.2f}× {rows[i].get('peer') or ''}" for i in places]
    bars = axis.barh(places, values, color=colours, height=0.7)
    axis.bar_label(bars, labels, padding=3, fontsize=7)
    axis.set_yticks(range(len(rows)), [name_of(row) for row in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.axvline(1, color="black", linewidth=0.8)
    # Room on the right for the labels, which are longer where they name a peer.
    axis.set_xlim(0, max([1.0, *values]) * (1.6 if field == "ratio" else 1.15))
    axis.set_xlabel(FIELDS[field], fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    return len(places)


def plot(files, out):
    # About a quarter of an inch per bar. Both halves of a file show the same cases side by side.
    heights = [1.0 + 0.22 * len(rows) for _, rows in files]
    figure, axes = plt.subplots(
        len(files),
        2,
        figsize=(13, sum(heights) + 0.4),
        squeeze=False,
        sharey="row",
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    drawn = 0
    for (title, rows), pair in zip(files, axes, strict=True):
        pair[0].set_title(title, fontsize=9, loc="left")
        drawn += sum(draw(axis, rows, field) for axis, field in zip(pair, FIELDS, strict=True))
    stages = dict.fromkeys(row["stage"] for _, rows in files for row in rows)
    legend = [Patch(color=COLOURS.get(stage, OTHER), label=stage) for stage in stages]
    figure.legend(handles=legend, loc="outside upper center", ncols=len(legend), fontsize=8)
    figure.savefig(out, dpi=150)
    plt.close(figure)
    return drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", help="JSON of winnow bench")
    parser.add_argument("-o", "--out", required=True, help="picture to write: .svg or .png")
    parser.add_argument("--only", default="", help='regular expression over "stage case kernel"')
    parser.add_argument(
        "--most", type=int, default=MOST_ROWS, help=f"rows drawn of a file ({MOST_ROWS})"
    )
    arguments = parser.parse_args()
    files = [chosen(path, arguments.only, arguments.most) for path in arguments.files]
    drawn = plot(files, arguments.out)
    print(f"{arguments.out}: {drawn} bars")


if __name__ == "__main__":
    main()
