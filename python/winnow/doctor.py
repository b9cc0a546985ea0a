"""`python -m winnow.doctor`: does a serving engine on this machine use winnow, and if not, why.

Exit codes: 0 every installed engine uses winnow (for the model, if one is given), 1 one does not,
2 a wrong argument, 3 no engine is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import winnow
from winnow.engines.report import FAMILIES, Report, model_config

_ENGINES = ("vllm", "sglang")


def _kernels() -> list[str]:
    """For each device, the attention kernels that run here."""
    found: dict[str, list[str]] = {}
    for kernel in winnow.support():
        if kernel.stage == "attend" and kernel.available and kernel.kernel != "reference":
            found.setdefault(kernel.device, []).append(kernel.kernel)
    return [f"{device}: {', '.join(names)}" for device, names in found.items()]


def _show(report: Report) -> str:
    if not report.installed:
        return f"{report.engine}: not installed"
    answer = f"does not use winnow: {report.refused}" if report.refused else "uses winnow"
    return "\n".join(
        [f"{report.engine} {report.version} {answer}", *map("  {}".format, report.facts)]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m winnow.doctor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--model", help=f"a config.json, a folder that has one, or one of {', '.join(FAMILIES)}"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="as the engine is told: auto (the default), fp8_ds_mla",
    )
    given = parser.parse_args(arguments)
    try:
        model = model_config(given.model) if given.model else None
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(["winnow", *map("  {}".format, _kernels())]))
    installed = []
    for name in _ENGINES:
        module = importlib.import_module(f"winnow.engines.{name}.doctor")
        report = module.report(model, given.kv_cache_dtype)
        print(_show(report))
        if report.installed:
            installed.append(report)
    if not installed:
        return 3
    return int(any(report.refused for report in installed))


if __name__ == "__main__":
    sys.exit(main())
