"""What `python -m winnow.doctor` says about an engine, and the models that it asks about."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib


@dataclasses.dataclass
class Report:
    """An engine on this machine. `refused` is "" if winnow serves it (and the model, if one was
    given), else why not; `facts` are lines to show whatever the answer."""

    engine: str
    version: str = ""
    refused: str = ""
    facts: list[str] = dataclasses.field(default_factory=list)

    @property
    def installed(self) -> bool:
        return bool(self.version)


def version_of(package: str) -> str:
    """The version of a package that is there, maybe as a folder that nobody installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


# What the engines read of the published checkpoints' config.json.
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16", "index_topk": 2048}
FAMILIES = {
    "deepseek_v32": {**_MLA, "model_type": "deepseek_v32", "num_attention_heads": 128},
    "glm_moe_dsa": {**_MLA, "model_type": "glm_moe_dsa", "num_attention_heads": 64},
    "deepseek_v4": {
        "model_type": "deepseek_v4",
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "dtype": "bfloat16",
        "index_topk": 512,
        "num_attention_heads": 64,
    },
}


def model_config(name: str) -> dict:
    """The configuration by a family's name, a config.json, or a folder that has one."""
    if name in FAMILIES:
        return FAMILIES[name]
    path = pathlib.Path(name)
    if path.is_dir():
        path = path / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        families = ", ".join(FAMILIES)
        raise ValueError(f"model: expected {families} or a config.json: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"model: expected an object in {path}, found {type(found).__name__}")
    return found


def is_v4(config: dict) -> bool:
    """DeepSeek V4 has attention layers of its own in an engine."""
    return config.get("model_type") == "deepseek_v4"


def why_not_sparse_mla(config: dict) -> str:
    """Why winnow has nothing to do with a model, by its configuration; "" if it has."""
    if is_v4(config) or ("index_topk" in config and "kv_lora_rank" in config):
        return ""
    kind = config.get("model_type", "a model without model_type")
    return f"{kind} has no sparse MLA (index_topk and kv_lora_rank)"
