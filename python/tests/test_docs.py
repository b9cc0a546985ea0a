"""The examples of docs/python.md and docs/layers.md, in order, and the plot script."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "least"), [("python.md", 7), ("layers.md", 3)])
def test_examples_of_the_docs(page, least):
    pytest.importorskip("ml_dtypes")
    pytest.importorskip("transformers", minversion="5.22")
    text = (ROOT / "docs" / page).read_text()
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.S))
    assert len(blocks) >= least
    names = {}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = "\n" * line + block.group(1)  # errors then name the line of the page
        exec(compile(code, str(ROOT / "docs" / page), "exec"), names)


def test_example_of_the_readme():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names = {}
    exec(block, names)
    assert (names["out"] == 1).all()


def test_example_of_v4():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "v4.py"], check=True, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and "64 of 126 states" in lines[-1]


ROW = {"stage": "attend", "case": "v32 h128", "kernel": "amx", "us": 9.5, "roof_share": 0.5}


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_plot(tmp_path, ending):
    pytest.importorskip("matplotlib")
    saved = {
        "header": {"cpu": "a CPU", "gpu": None, "version": "0.1.0", "commit": "abc"},
        "results": [{**ROW, "ratio": 1.2}, {**ROW, "stage": "select", "ratio": None}],
    }
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    (tmp_path / "rows.json").write_text(json.dumps([{**ROW, "roof_share": None, "ratio": 0.9}]))
    out = tmp_path / f"plot.{ending}"
    script = ROOT / "tools" / "plot_bench.py"
    files = [tmp_path / "saved.json", tmp_path / "rows.json"]
    done = subprocess.run(
        [sys.executable, script, *files, "-o", out], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("4 bars")  # 2 shares of the roof and 2 ratios
    only = subprocess.run(
        [sys.executable, script, files[0], "--only", "select", "-o", out],
        check=True,
        capture_output=True,
        text=True,
    )
    assert only.stdout.strip().endswith("1 bars")
    head = out.read_bytes()[:200]
    assert (b"<?xml" in head) if ending == "svg" else head.startswith(b"\x89PNG")


def test_plot_has_a_colour_for_every_stage():
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import plot_bench
    finally:
        sys.path.pop(0)
    stored = [json.loads(p.read_text()) for p in (ROOT / "bench" / "results").glob("*.json")]
    stages = {row["stage"] for file in stored if "results" in file for row in file["results"]}
    assert len(stages) > 10 and stages <= plot_bench.COLOURS.keys()
    colours = [*plot_bench.COLOURS.values(), plot_bench.OTHER]
    assert len(colours) == len(set(colours))


def test_plot_without_matplotlib(tmp_path):
    """Without matplotlib: one line, no traceback."""
    script = ROOT / "tools" / "plot_bench.py"
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    done = subprocess.run(
        [sys.executable, script, tmp_path / "rows.json", "-o", tmp_path / "plot.svg"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "plot_bench needs matplotlib: pip install matplotlib\n"
