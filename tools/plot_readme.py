#!/usr/bin/env python3
"""Draws README's plot of speed-ups and fills in README's tables of speed, from the stored results.

    tools/plot_readme.py            writes docs/pictures/speedup.svg and README's tables
    tools/plot_readme.py --check    writes nothing; fails if either is not current

Sources, all in bench/results:
    h200-attend-in-turns    decode and prefill beside FlashMLA as vLLM 0.26.0's wheel ships it, and
                            beside FlashMLA built from its sources
    h200-in-turns           select beside vLLM's
    h200-attend, cpu-*      score, and the CPUs: a peer's stored time (bench/peers) by winnow's
    cpu-zen5-in-turns       beside ik_llama.cpp and vLLM's wheel for CPUs
Standard library only.
"""

import argparse
import dataclasses
import html
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "speedup.svg"
README = ROOT / "README.md"


def results(name):
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["results"]


def lifted(rows, key):
    """Rows whose `us` and `ratio` stand under `key`."""
    return [row | row[key] for row in rows]


@dataclasses.dataclass
class Line:
    """One row of the plot: a shape, its peer, and every stored case of it.

    A case has a name and a ratio; above 1, winnow is faster than the peer. `times` are winnow's own
    in microseconds; a line that has some is a row of README's table too. `built` are the same cases
    beside FlashMLA built from its sources.
    """

    stage: str
    label: str
    detail: str
    peer: str
    cases: list
    times: list = dataclasses.field(default_factory=list)
    in_turns: bool = True
    built: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Panel:
    title: str
    ticks: list
    low: float
    high: float
    lines: list


def span(ends, form):
    """ "1.15–1.79", or one number where both ends read the same."""
    return "–".join(dict.fromkeys(form(end) for end in ends))


def ratio_span(cases):
    """The lowest and the highest ratio of some cases, or nothing where there are none."""
    if not cases:
        return ""
    ratios = [ratio for _, ratio in cases]
    return span((min(ratios), max(ratios)), lambda x: f"{x:.2f}" if x < 4 else f"{x:.1f}") + "×"


def time_span(times):
    return span((min(times), max(times)), lambda us: f"{us:,.0f}" if us >= 100 else f"{us:.1f}")


def cases(rows, keep):
    """(case, ratio) of the rows that `keep` accepts. A row with `ratios` gives its two ends."""
    found = []
    for row in rows:
        ratios = row.get("ratios") or [row.get("ratio")]
        found += [(row["case"], ratio) for ratio in ratios if ratio and keep(row)]
    if not found:
        sys.exit("plot_readme: a line of the plot has no stored result")
    return found


def times(rows, names, kernel=None):
    """winnow's times of the named cases, in microseconds."""
    found = {r["case"]: r["us"] for r in rows if kernel in (None, r.get("kernel")) and r.get("us")}
    missing = [name for name in names if name not in found]
    if missing:
        sys.exit(f"plot_readme: no stored result of {missing[0]!r}")
    return [found[name] for name in names]


# Stage, label, detail, the cases in turns with FlashMLA.
FLASH_MLA = [
    (
        "decode",
        "decode, V3.2, 128 heads",
        "1 to 256 tokens",
        r"V3\.2 H=128 b=\d+",
    ),
    (
        "decode",
        "decode, V3.2, 64 heads",
        "1 to 256 tokens",
        r"V3\.2 H=64 b=\d+",
    ),
    (
        "decode",
        "decode, V3.2, 16 and 32 heads",
        "1 to 256 tokens",
        r"V3\.2 H=(16|32) b=\d+",
    ),
    (
        "decode",
        "decode, V4, 64 heads",
        "2 to 256 tokens",
        r"V4 H=64 128\+512 b=\d+ s_q=2",
    ),
    (
        "decode",
        "decode, V4, 128 heads",
        "2 to 256 tokens",
        r"V4 H=128 128\+1024 b=\d+ s_q=2",
    ),
    (
        "decode",
        "decode, V4, window alone",
        "8 to 256 tokens",
        r"V4 H=\d+ 128 alone .*",
    ),
    (
        "prefill",
        "prefill, 64 and 128 heads",
        "64 to 4,096 tokens",
        r"prefill .*",
    ),
]


def flash_mla_lines():
    stored = results("h200-attend-in-turns")
    lines = []
    for stage, label, detail, names in FLASH_MLA:
        chosen = [row for row in stored if re.fullmatch(names, row["case"])]
        rows = lifted(chosen, "winnow")
        peer = "FlashMLA" + (", padded to 64" if "16 and 32" in label else "")
        found = cases(rows, lambda row: True)
        line = Line(stage, label, detail, peer, found, [row["us"] for row in rows])
        line.built = cases(lifted(chosen, "flashmla_9241ae3"), lambda row: True)
        lines.append(line)
    return lines


def fastest_peers(rows):
    """The rows of select against the fastest peer that was measured for their case."""
    best = {}
    for row in rows:
        if row["stage"] == "select":
            best[row["case"]] = min(best.get(row["case"], row), row, key=lambda r: r["ratio"])
    return list(best.values())


def gpu_panel():
    picked = fastest_peers(results("h200-in-turns"))
    scored = results("h200-attend")
    logits = [row for row in scored if row["case"].startswith("logits") and row["peer"]]
    lines = [
        *flash_mla_lines(),
        Line(
            "select",
            "select",
            "top 512 or 2,048 of 8k to 1M",
            "vLLM 0.32's fastest top-k",
            cases(picked, lambda row: True),
            [row["us"] for row in picked],
        ),
        Line(
            "score",
            "score",
            "64 heads, 8k to 128k keys",
            "DeepGEMM",
            cases(logits, lambda row: True),
            [row["us"] for row in logits],
            in_turns=False,
        ),
    ]
    return Panel("NVIDIA H200", [0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2], 0.8, 2.2, lines)


def cpu_lines(name, machine, kernel, peer="ik_llama.cpp"):
    """Two lines of a CPU, with warm caches: attend for one token, and score with select."""
    rows = results(name)

    def warm(stage, prefix):
        def keep(row):
            one = row["stage"] == stage and row["batch"] == 1 and row["kernel"] == kernel
            return one and row["case"].startswith(prefix) and row["case"].endswith("warm")

        return cases(rows, keep)

    attend = warm("attend", "v32 h")
    mine = times(rows, [case for case, _ in attend], kernel)
    score = warm("score", "topk 2048 h64")
    return [
        Line("attend", f"attend, {machine}", "16 to 128 heads", peer, attend, mine, in_turns=False),
        Line(
            "score",
            f"score and select, {machine}",
            "32k keys",
            "ik_llama.cpp",
            score,
            in_turns=False,
        ),
    ]


# Stage, label, detail, peer, the cases in turns with it; each case against the peer's faster form.
ZEN5 = [
    (
        "attend",
        "attend, Zen 5, 2 cores",
        "16 to 128 heads",
        "ik_llama.cpp",
        r"V3\.2, 1 token, (16|64|128) heads, top-k 2048",
    ),
    (
        "attend",
        "attend, V4, Zen 5",
        "64 and 128 heads",
        "vLLM 0.32",
        r"V4, 1 token, .*",
    ),
    (
        "score",
        "score and select, Zen 5, 2 cores",
        "8k to 128k keys",
        "ik_llama.cpp",
        r"top 2048, 1 token, 64 heads, .*",
    ),
]


def zen5_lines():
    stored = [row for row in results("cpu-zen5-in-turns") if row["cache"] == "warm"]
    lines = []
    for stage, label, detail, peer, names in ZEN5:
        rows = [r for r in stored if r["stage"] == stage and re.fullmatch(names, r["case"])]
        mine = [row["winnow"]["us"] for row in rows] if stage == "attend" else []
        lines.append(Line(stage, label, detail, peer, cases(rows, lambda row: True), mine))
    return lines


def cpu_panel():
    lines = [
        *cpu_lines("cpu-zen4", "Zen 4, 2 cores", "avx512bf16"),
        *cpu_lines(
            "cpu-emerald-rapids", "AMX, 2 cores", "amx", "a replica of SGLang/vLLM's scheme"
        ),
        *cpu_lines("cpu-emerald-rapids-16", "AMX, 16 cores", "amx"),
    ]
    return Panel("CPU, warm caches", [1, 2, 4, 8, 16], 0.8, 16, [*lines, *zen5_lines()])


# ---- The picture ---------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, ROW = 860, 335, 740, 38
STYLE = """
  .back { fill: #ffffff; stroke: #d0d7de; }
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .head { font-weight: 600; font-size: 15px; }
  .peer, .tick, .note { fill: #59636e; font-size: 11.5px; }
  .grid { stroke: #d0d7de; stroke-width: 1; }
  .one { stroke: #59636e; stroke-width: 1.5; }
  .decode { fill: #0969da; stroke: #0969da; }
  .attend { fill: #0969da; stroke: #0969da; }
  .prefill { fill: #1a7f37; stroke: #1a7f37; }
  .select { fill: #bc4c00; stroke: #bc4c00; }
  .score { fill: #8250df; stroke: #8250df; }
  .span { stroke-width: 7; stroke-opacity: 0.22; stroke-linecap: round; }
  .apart { fill: #ffffff; stroke-width: 2; }
  .built { fill: #818b98; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; stroke: #3d444d; }
    text { fill: #f0f6fc; }
    .peer, .tick, .note { fill: #9198a1; }
    .grid { stroke: #2a313c; }
    .one { stroke: #9198a1; }
    .decode, .attend { fill: #4493f8; stroke: #4493f8; }
    .prefill { fill: #3fb950; stroke: #3fb950; }
    .select { fill: #f0883e; stroke: #f0883e; }
    .score { fill: #ab7df8; stroke: #ab7df8; }
    .apart { fill: #0d1117; }
  }
"""


def text(x, y, words, kind="", anchor="start", detail=""):
    words = html.escape(words)
    if detail:
        words += f' <tspan class="peer">{html.escape(detail)}</tspan>'
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}"{anchor}>{words}</text>'


def dot(x, y, stage, in_turns, title=""):
    kind = stage if in_turns else f"{stage} apart"
    title = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="4.2">{title}</circle>'


def small_dot(x, y, title=""):
    title = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<circle class="built" cx="{x:.1f}" cy="{y}" r="2.6">{title}</circle>'


def draw_line(line, y, place):
    at = [place(ratio) for _, ratio in line.cases]
    ends = f'x1="{min(at):.1f}" y1="{y}" x2="{max(at):.1f}" y2="{y}"'
    out = [
        text(20, y - 2, line.label + ("," if line.detail else ""), detail=line.detail),
        text(20, y + 13, f"against {line.peer}", "peer"),
        text(WIDTH - 20, y + 4.5, ratio_span(line.cases), "", "end"),
        f'<line class="{line.stage} span" {ends}/>',
    ]
    for case, ratio in line.built:
        out.append(small_dot(place(ratio), y + 11, f"{case}, FlashMLA 9241ae3: {ratio:.2f}×"))
    for (case, ratio), x in zip(line.cases, at, strict=True):
        out.append(dot(x, y, line.stage, line.in_turns, f"{case}: {ratio:.2f}×"))
    return out


def draw_panel(panel, top):
    """The panel's elements, and the y below it."""
    scale = math.log(panel.high / panel.low)

    def place(ratio):
        return LEFT + (RIGHT - LEFT) * math.log(ratio / panel.low) / scale

    first = top + 32
    bottom = first + ROW * len(panel.lines)
    out = [text(20, top + 10, panel.title, "head")]
    for tick in panel.ticks:
        x = place(tick)
        kind = "one" if tick == 1 else "grid"
        ends = f'x1="{x:.1f}" y1="{first - 10}" x2="{x:.1f}" y2="{bottom - 6}"'
        out.append(f'<line class="{kind}" {ends}/>')
        out.append(text(x, bottom + 10, f"{tick:g}×", "tick", "middle"))
    out.append(text(place(1) - 8, top + 13, "← slower", "note", "end"))
    out.append(text(place(1) + 8, top + 13, "faster than the peer →", "note"))
    for i, line in enumerate(panel.lines):
        out += draw_line(line, first + ROW * i + ROW // 2 - 8, place)
    return out, bottom + 44


def draw(panels):
    body, y = [], 58
    for panel in panels:
        elements, y = draw_panel(panel, y)
        body += elements
    y -= 12
    body.append(dot(26, y - 4, "decode", True))
    body.append(text(38, y, "both libraries launched in turn, in one process", "note"))
    body.append(dot(340, y - 4, "decode", False))
    body.append(text(352, y, "each measured by itself, on the same kind of machine", "note"))
    y += 20
    body.append(small_dot(26, y - 4))
    built = "FlashMLA 9241ae3, built from its sources, in the same turns"
    body.append(text(38, y, f"{built}; large dots: FlashMLA of vLLM 0.26.0", "note"))
    height = y + 20
    title = "Speed-up over other implementations, one dot a measured case"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">'
    )
    frame = f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    parts = [head, f"<title>{title}</title>", f"<style>{STYLE}</style>", frame]
    return "\n".join([*parts, text(20, 32, title, "head"), *body, "</svg>"]) + "\n"


# ---- README's tables -------------------------------------------------------------------------


def table(panel):
    out = [f"| {panel.title} | winnow, µs | peer | speed-up |", "|---|---:|---|---|"]
    for x in panel.lines:
        if x.times:
            out.append(f"| {x.label} | {time_span(x.times)} | {x.peer} | {ratio_span(x.cases)} |")
    return "\n".join(out) + "\n"


def beside_built(panel):
    """The caveat of the second build of FlashMLA."""
    spans = []
    for label in ("decode, V3.2", "decode, V4", "prefill"):
        found = [case for x in panel.lines if x.label.startswith(label) for case in x.built]
        spans.append(f"{label} {ratio_span(found)}")
    return (
        "- FlashMLA 9241ae3, built from its sources, is up to a sixth faster. Beside it:\n"
        f"  {'; '.join(spans)}.\n"
    )


def with_tables(readme, tables):
    for name, words in tables.items():
        begin, end = f"<!--{name}:begin-->\n", f"<!--{name}:end-->"
        if begin not in readme or end not in readme:
            raise SystemExit(f"plot_readme: expected the markers of {name!r} in {README.name}")
        before, rest = readme.split(begin, 1)
        readme = before + begin + words + end + rest.split(end, 1)[1]
    return readme


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if not current")
    check = parser.parse_args().check
    gpu, cpu = gpu_panel(), cpu_panel()
    readme = with_tables(
        README.read_text(), {"h200": table(gpu), "cpu": table(cpu), "built": beside_built(gpu)}
    )
    wanted = {PICTURE: draw([gpu, cpu]), README: readme}
    stale = [p for p, words in wanted.items() if not p.exists() or p.read_text() != words]
    names = ", ".join(str(p.relative_to(ROOT)) for p in stale)
    if check and stale:
        sys.exit(f"plot_readme: not current: {names} (run tools/plot_readme.py)")
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
    print(f"wrote {names}" if stale else "current")


if __name__ == "__main__":
    main()
