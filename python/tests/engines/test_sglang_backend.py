"""SGLang's attention backends for V3.2 and V4 over winnow's hooks, by SGLang's own cases."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from versions import since

# These take minutes and have nothing to do with vLLM: beside the newest version of it is enough.
pytestmark = pytest.mark.skipif(not since(0, 33), reason="run beside the newest vLLM only")
HERE = pathlib.Path(__file__).parent
DECODE, ROWS = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What sglang_backend.py found, in a process without vLLM's settings."""
    path = tmp_path_factory.mktemp("sglang") / "answer.json"
    environment = {k: v for k, v in os.environ.items() if k != "WINNOW_SGLANG"}
    done = subprocess.run(
        [sys.executable, HERE / "sglang_backend.py", path],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("model, cases", [("v32", 13), ("v4", 29)])
def test_winnow_serves_every_case(answers, model, cases):
    found = {name: got for name, got in answers.items() if name.startswith(model + " ")}
    assert len(found) == cases
    assert {name: got["raised"] for name, got in found.items() if got["raised"]} == {}
    # One call a case, and no case that winnow had no part in.
    assert all(sum(got["calls"].values()) == 1 for got in found.values())


def test_both_functions_are_reached(answers):
    for name, got in answers.items():
        if name.startswith("v32"):
            expected = DECODE if "flashmla_kv" in name.split()[2] else ROWS
            assert list(got["calls"]) == [expected], name
