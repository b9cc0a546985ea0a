#!/usr/bin/env python3
"""Draws what `winnow bench` stored: the share of the roof that each case reaches, and the ratio to
a peer's time where one is known.

    tools/plot_bench.py bench/results/NAME.json -o NAME.svg     (or .png; a row for each file)

Takes `--save` files (header and results) and the bare rows of `--json`. Needs matplotlib.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BARS = {"roof_share": "share of the roof", "ratio": "peer's time / winnow's time"}
COLOURS = plt.get_cmap("tab10").colors


def read(path):
    """(title, rows) of a file."""
    stored = json.loads(pathlib.Path(path).read_text())
    if isinstance(stored, list):
        return pathlib.Path(path).stem, stored
    header = stored["header"]
    machine = header.get("gpu") or header["cpu"]
    return f"{machine}, winnow {header['version']} ({header['commit']})", stored["results"]


def draw(axis, rows, field):
    """Horizontal bars of the rows that have the field, a colour per stage; a line at 1."""
    rows = [r for r in rows if isinstance(r.get(field), (int, float))]
    stages = list(dict.fromkeys(r["stage"] for r in rows))
    values = [r[field] for r in rows]
    colours = [COLOURS[stages.index(r["stage"]) % len(COLOURS)] for r in rows]
    bars = axis.barh(range(len(rows)), values, color=colours, height=0.7)
    form = "{:.0%}" if field == "roof_share" else "{:.2f}×"
    axis.bar_label(bars, [form.format(v) for v in values], padding=3, fontsize=7)
    names = [f"{r['stage']} {r['case']} · {r['kernel']}" for r in rows]
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlim(0, max([1.0, *values]) * 1.15)
    axis.set_xlabel(BARS[field], fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    if not rows:
        axis.text(0.5, 0.5, "no rows", ha="center", va="center", transform=axis.transAxes)
    return len(rows)


def plot(paths, out):
    files = [read(p) for p in paths]
    # A quarter of an inch per bar; a row of the figure is as high as its longer half.
    heights = [1.2 + 0.25 * max(1, len(rows)) for _, rows in files]
    figure, axes = plt.subplots(
        len(files),
        2,
        figsize=(13, sum(heights)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    drawn = 0
    for (title, rows), pair in zip(files, axes, strict=True):
        pair[0].set_title(title, fontsize=9, loc="left")
        drawn += sum(draw(axis, rows, field) for axis, field in zip(pair, BARS, strict=True))
    figure.savefig(out, dpi=150)
    plt.close(figure)
    return drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", help="JSON of winnow bench")
    parser.add_argument("-o", "--out", required=True, help="picture to write: .svg or .png")
    arguments = parser.parse_args()
    drawn = plot(arguments.files, arguments.out)
    print(f"{arguments.out}: {drawn} bars")


if __name__ == "__main__":
    main()
