"""SGLang on this machine: installed, and whether winnow's hooks would be registered."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os

from winnow.engines import sglang as plugin
from winnow.engines import switches
from winnow.engines.report import Report, version_of

_GROUP = "sglang.srt.plugins"


def report(model: dict | None, kv_cache_dtype: str) -> Report:
    found = Report("SGLang")
    if importlib.util.find_spec("sglang") is None:
        return found
    found.version = version_of("sglang")
    points = [p.value for p in importlib.metadata.entry_points(group=_GROUP, name="winnow")]
    found.facts.append(f"plugin: {points[0] if points else 'no entry point'}")
    found.facts.append(switches.shown(plugin.SWITCH))
    # SGLang takes an empty list for none.
    allowed = os.environ.get("SGLANG_PLUGINS")
    wrong = switches.refused(plugin.SWITCH)
    if wrong:
        found.refused = wrong
    elif switches.asked(plugin.SWITCH) is False:
        found.refused = f"switched off by {plugin.SWITCH}=0"
    elif not points:
        found.refused = f"winnow is not installed as a package: no entry point {_GROUP}"
    elif allowed and "winnow" not in [name.strip() for name in allowed.split(",")]:
        found.refused = f"SGLANG_PLUGINS={allowed} leaves winnow out"
    else:
        found.refused = plugin.version_refused(found.version) or plugin._kernels_refused()
    return found
