"""`python -m winnow.doctor` beside a real vLLM on a pretended Hopper."""

import pytest
import vllm

from winnow import doctor

FP8 = ["--kv-cache-dtype", "fp8_ds_mla"]


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setattr(doctor, "_ENGINES", ("vllm",))
    monkeypatch.delenv("WINNOW_VLLM", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def said(capsys, arguments, code):
    assert doctor.main(arguments) == code
    return capsys.readouterr().out


def test_without_model(capsys):
    out = said(capsys, [], 0)
    assert f"vLLM {vllm.__version__} uses winnow" in out
    assert "plugin: winnow.engines.vllm:register" in out and "WINNOW_VLLM: not set" in out


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_chosen(capsys, family):
    out = said(capsys, ["--model", family, *FP8], 0)
    path = "winnow.engines.vllm.flashmla_sparse.WinnowFlashMLASparseBackend"
    assert f"backend: {path}" in out


def test_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("WINNOW_VLLM", "0")
    out = said(capsys, ["--model", "deepseek_v32"], 1)
    assert "does not use winnow: switched off by WINNOW_VLLM=0" in out


@pytest.mark.parametrize("name", ["WINNOW_VLLM", "WINNOW_VLLM_LAYERS"])
def test_switch_with_another_value(capsys, monkeypatch, name):
    monkeypatch.setenv(name, "off")
    out = said(capsys, ["--model", "deepseek_v32"], 1)
    assert f"does not use winnow: {name}: expected 0 or 1, found off" in out


def test_left_out(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert "VLLM_PLUGINS=another leaves winnow out" in said(capsys, [], 1)


def test_unknown_version(capsys, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "9.9")
    assert "vLLM 9.9 was never tried" in said(capsys, [], 1)


def test_v4(capsys):
    """Served by replaced methods, not by a backend."""
    out = said(capsys, ["--model", "deepseek_v4"], 0)
    assert "uses winnow" in out and "WINNOW_VLLM_LAYERS: not set" in out


def test_other_model(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    out = said(capsys, ["--model", str(config)], 1)
    assert "does not use winnow: llama has no sparse MLA" in out


def test_no_kernels(capsys, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    out = said(capsys, ["--model", "deepseek_v32", *FP8], 1)
    assert "this build of winnow has no attention kernel for cuda" in out
    assert "backend: vllm." in out


def test_sglang(capsys, monkeypatch):
    """Installed beside vLLM, and without a Hopper GPU not served."""
    monkeypatch.setattr(doctor, "_ENGINES", ("vllm", "sglang"))
    monkeypatch.delenv("WINNOW_SGLANG", raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    out = said(capsys, [], 1)
    assert "vLLM" in out and "SGLang 0.5.23 does not use winnow: this build of winnow" in out
    assert "plugin: winnow.engines.sglang:register" in out
    for value, answer in (
        ("0", "switched off by WINNOW_SGLANG=0"),
        ("no", "WINNOW_SGLANG: expected 0 or 1, found no"),
    ):
        monkeypatch.setenv("WINNOW_SGLANG", value)
        assert f"SGLang 0.5.23 does not use winnow: {answer}" in said(capsys, [], 1)
    monkeypatch.delenv("WINNOW_SGLANG")
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert "SGLANG_PLUGINS=another leaves winnow out" in said(capsys, [], 1)


def test_leaves_nothing_behind(capsys):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    said(capsys, [], 0)
    assert not AttentionBackendEnum.FLASHMLA_SPARSE.is_overridden()
