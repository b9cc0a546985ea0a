"""Damaged arguments of every public function: WINNOW_HOSTILE_SECONDS for a longer sweep."""

import os
import pathlib
import re
import subprocess
import sys

import hostile
import winnow
import winnow.flash_mla
import winnow.hf
import winnow.torch

SCRIPT = pathlib.Path(hostile.__file__)


def test_every_public_function_is_called():
    made = hostile.calls()
    public = {n for n in dir(winnow) if not n.startswith("_") and callable(getattr(winnow, n))}
    # Results, which cannot be made; functions without arguments; modules' own checks.
    public -= {"BatchSplit", "KernelInfo", "Model", "Part", "V4Chunk"}
    public -= {"cpu_name", "head_sizes", "support", "threads"}
    assert public <= set(made), public - set(made)
    operators = {n.split("::")[1].split(".")[0] for n in winnow.torch.registration.library._op_defs}
    assert {f"ops.{n}" for n in operators} <= set(made)


def test_undamaged_calls_are_served():
    """A call that is refused as it stands would hide what its damage does."""
    for function, good in hostile.calls().values():
        guarded = hostile.Guarded()
        function(**{k: hostile.copied(v, guarded) for k, v in good.items()})


def test_hostile_calls(tmp_path):
    seconds = float(os.environ.get("WINNOW_HOSTILE_SECONDS", 8))
    seed = int(os.environ.get("WINNOW_HOSTILE_SEED", 0))
    progress = tmp_path / "case"
    progress.write_bytes(bytes(8))
    options = ["--seed", seed, "--seconds", seconds, "--progress", progress]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", SCRIPT, *map(str, options)],
        capture_output=True,
        text=True,
        # One malloc arena: the limit is on address space, and each thread's arena reserves 64 MB.
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "MALLOC_ARENA_MAX": "1"},
        timeout=seconds + 300,
    )
    case = int.from_bytes(progress.read_bytes(), "little")
    assert done.returncode == 0, (
        f"status {done.returncode} in seed {seed}, case {case}:\n{done.stderr[-3000:]}"
    )
    count = int(re.match(r"(\d+) calls", done.stdout).group(1))
    print(done.stdout.strip())
    assert count > 100
