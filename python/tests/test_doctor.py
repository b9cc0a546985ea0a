"""`python -m winnow.doctor` without an engine; with one: engines/test_doctor.py."""

import importlib.util
import json
import subprocess
import sys

import pytest

from winnow import doctor
from winnow.engines import report


@pytest.fixture
def no_engine(monkeypatch):
    find = importlib.util.find_spec
    engines = {"vllm", "sglang"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in engines else find(name, *a)
    )


def test_no_engine(no_engine, capsys):
    assert doctor.main([]) == 3
    out = capsys.readouterr().out
    assert "vLLM: not installed" in out and "  cpu: " in out


def test_engine_that_cannot_be_imported(capsys, monkeypatch, tmp_path):
    """A line in the report, and the other engine's report follows."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import no_such_module_of_vllm")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    said = "does not use winnow: vLLM cannot be imported: ModuleNotFoundError: No module named"
    assert f"{said} 'no_such_module_of_vllm'" in out and "SGLang" in out


def test_help():
    command = [sys.executable, "-m", "winnow.doctor", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--model" in done.stdout and "Exit codes" in done.stdout


@pytest.mark.parametrize("text", [None, "[]", "{"])
def test_wrong_model(no_engine, capsys, tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["--model", str(tmp_path)])
    assert stopped.value.code == 2
    assert "error: model: expected" in capsys.readouterr().err


def test_models(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        config = report.model_config(name)
        assert report.why_not_sparse_mla(config) == (
            "llama has no sparse MLA (index_topk and kv_lora_rank)"
        )
    for family in report.FAMILIES:
        config = report.model_config(family)
        assert report.why_not_sparse_mla(config) == ""
        assert report.is_v4(config) == (family == "deepseek_v4")
