"""Tests against the real classes of an engine, in an environment of their own."""

import logging
import os
import pathlib
import sys

import pytest

# What vLLM's modules find when they are imported decides what they are: hence before all tests.
os.environ.setdefault("WINNOW_VLLM", "0")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import hopper

hopper.pretend()


@pytest.fixture
def plugin(monkeypatch):
    """winnow.engines.vllm, allowed to register; what it does is undone behind the test."""
    import winnow.engines.vllm

    monkeypatch.delenv("WINNOW_VLLM", raising=False)
    yield winnow.engines.vllm
    winnow.engines.vllm.unregister()


@pytest.fixture
def lines():
    """The lines that winnow writes into vLLM's log."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    log = logging.getLogger("vllm.winnow")
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)
