"""Environment variables that are 0, 1 or not set."""

from __future__ import annotations

import os


def asked(name: str) -> bool | None:
    """False for 0, True for 1, None for a variable that is empty or not set. Another value raises:
    who writes "off" means 0, and would get what he wanted to be without."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, found {value}")
    return value == "1" if value else None


def refused(*names: str) -> str:
    """What is wrong with the first of these variables that is; "" if none is."""
    try:
        for name in names:
            asked(name)
    except ValueError as error:
        return str(error)
    return ""


def shown(name: str) -> str:
    """A variable as a line of a report."""
    return f"{name}: {os.environ.get(name) or 'not set'}"
