"""SGLang on this machine: installed, and whether winnow's hooks would be registered."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os

from winnow.engines import sglang as plugin
from winnow.engines.report import Report

_GROUP = "sglang.srt.plugins"


def report(model: dict | None, kv_cache_dtype: str) -> Report:
    found = Report("SGLang")
    if importlib.util.find_spec("sglang") is None:
        return found
    found.version = importlib.metadata.version("sglang")
    switch = os.environ.get("WINNOW_SGLANG")
    points = [p.value for p in importlib.metadata.entry_points(group=_GROUP, name="winnow")]
    found.facts.append(f"plugin: {points[0] if points else 'no entry point'}")
    found.facts.append(f"WINNOW_SGLANG: {'not set' if switch is None else switch}")
    if switch == "0":
        found.refused = "switched off by WINNOW_SGLANG=0"
    elif not points:
        found.refused = f"winnow is not installed as a package: no entry point {_GROUP}"
    else:
        found.refused = plugin.version_refused(found.version) or plugin._kernels_refused()
    return found
