"""A process around its calls: refills beside them, memory that is missing, its end, other
interpreters. What could end the process runs in one of its own."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import winnow

INT = torch.int32


def run(code, *arguments):
    """Runs code in a process of its own; its output, or the failure with what it said."""
    code = textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.strip()


def test_refill_beside_a_call():
    """A plan that a call uses cannot be refilled, and can be again when the call has returned."""
    tokens, heads = 32, 64
    q = torch.randn(tokens, heads, 512).bfloat16()
    cache = winnow.Cache(torch.randn(4096, 512).bfloat16(), "v4_bf16")
    indices = torch.randint(0, 4096, (tokens, 128), dtype=INT)
    plan = winnow.Plan(
        model="v4", format="v4_bf16", heads=heads, page=4096, pages=1, kernel="reference"
    )
    batch = list(range(tokens + 1)), [100] * tokens
    plan.refill(*batch)
    want = winnow.attend(q, cache, indices, scale=0.05, plan=plan)
    got, refused = [], []

    def attend():
        while not got:
            try:
                got.append(winnow.attend(q, cache, indices, scale=0.05, plan=plan))
            except RuntimeError as e:  # it came into a refill
                assert "attend: plan: expected one at rest" in str(e)

    thread = threading.Thread(target=attend)
    thread.start()
    while thread.is_alive():
        try:
            plan.refill(*batch)
        except RuntimeError as e:
            refused.append(str(e))
        time.sleep(0.001)
    thread.join()
    assert torch.equal(got[0], want)
    assert refused, "no refill met the call"
    assert refused[0].startswith("refill: plan: expected one that no call uses, found 1 in flight")
    plan.refill(*batch)


def test_calls_beside_a_refill():
    """While refill() runs, calls over the plan and its properties raise, and read nothing."""
    tokens = 1 << 21
    plan = winnow.Plan(heads=1, topk=1, pages=1 << 18, max_tokens=tokens, max_requests=1)
    batch = torch.tensor([0, tokens], dtype=INT), torch.tensor([tokens], dtype=INT)
    plan.refill(*batch)
    running, met = True, {"property": [], "call": [], "refill": []}

    def refill():
        while running:
            plan.refill(*batch)

    attempts = {
        "property": lambda: plan.tokens == tokens,
        "call": lambda: winnow.pipeline_workspace_bytes(plan) > 0,
        "refill": lambda: plan.refill(*batch) is None,
    }
    thread = threading.Thread(target=refill, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not all(met.values()) and time.monotonic() < until and thread.is_alive():
        for name, attempt in attempts.items():
            try:
                assert attempt()
            except RuntimeError as e:
                met[name].append(str(e))
    running = False
    thread.join()
    for name, messages in met.items():
        assert messages, f"no {name} met the refill"
        assert "plan: expected one at rest, found one that another thread refills" in messages[0]
    assert plan.tokens == tokens


def test_refill_from_within_a_call():
    """An argument's own code may refill the plan of the call that reads it."""
    plan = winnow.Plan(heads=2, topk=4, page=16, pages=1)
    plan.refill([0, 1], [5])

    class Workspace:
        def __init__(self):
            self.memory = torch.zeros(plan.workspace_bytes, dtype=torch.uint8)

        def __dlpack__(self, **kwargs):
            plan.refill([0, 1], [6])
            return self.memory.__dlpack__(**kwargs)

    q = torch.zeros(1, 2, 576).bfloat16()
    cache = winnow.Cache(
        torch.zeros(winnow.cache_shape("v32_fp8", 1, 16), dtype=torch.uint8), "v32_fp8", 16
    )
    with pytest.raises(TypeError, match="workspace: .* raised RuntimeError: refill: plan"):
        winnow.attend(
            q, cache, torch.zeros(1, 4, dtype=INT), scale=1.0, plan=plan, workspace=Workspace()
        )
    assert plan.seq_lens.tolist() == [5]
    plan.refill([0, 1], [6])


RACE = """
import sys, threading, numpy as np, torch, winnow
sys.setswitchinterval(1e-6)
rows, tokens = 1024, 8
memory = torch.zeros(winnow.cache_shape("v32_fp8", 16), dtype=torch.uint8)
cache = winnow.Cache(memory, "v32_fp8")
winnow.write(torch.randn(rows, 576).bfloat16(), torch.arange(rows), cache)
q = torch.randn(tokens, 128, 576).bfloat16()
indices = torch.randint(0, rows, (tokens, 1000), dtype=torch.int32)
plan = winnow.Plan(
    heads=128, topk=1000, pages=16, max_tokens=4096, max_requests=4096, split="fixed",
    split_size=100,
)

def batch(n):
    return np.arange(n + 1, dtype=np.int32), np.full(n, 1000, np.int32)

small, big = batch(tokens), batch(4096)
plan.refill(*small)
workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8)
call = lambda: winnow.attend(q, cache, indices, scale=0.05, plan=plan, workspace=workspace)
want, wrong, stop = call(), 0, []

def refill():
    while not stop:
        for next in (small, big, small):
            try:
                plan.refill(*next)
            except RuntimeError:
                pass

thread = threading.Thread(target=refill)
thread.start()
for _ in range(150):
    try:
        wrong += not torch.equal(call(), want)
    except (RuntimeError, ValueError):  # the plan is being refilled, or holds the other batch
        pass
stop.append(1)
thread.join()
print("wrong results:", wrong)
"""


def test_refills_and_calls_at_random():
    assert run(RACE) == "wrong results: 0"


MEMORY = """
import resource, sys, numpy as np, torch, winnow
with open("/proc/self/statm") as f:
    used = int(f.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
ids, logits = np.zeros((2, 4), np.int32), np.zeros((2, 50), np.float32)
column = ids[:, 0].copy()
keys = {"key_rows": np.zeros((5, 128), np.uint8), "key_scales": np.zeros(5, np.float32)}
q, weights = np.zeros((2, 4, 128), np.uint8), np.zeros((2, 4), np.float32)
members = {"__dlpack_c_exchange_api__": None, "__module__": "torch.older"}
older = type("Tensor", (torch.Tensor,), members)
calls = {
    "request_ids": lambda: winnow.request_ids([0, 1], tokens=2**33),
    "prefill_request_ids": lambda: winnow.prefill_request_ids([0, 1], 0, tokens=2**33),
    "select": lambda: winnow.select(logits, 2**33),
    "topk_mask": lambda: winnow.topk_mask(ids, 2**40),
    "c128a_lists": lambda: winnow.c128a_lists(column, column, ids, width=2**34, pages=1),
    "score": lambda: winnow.score(q, weights, column, width=2**34, **keys),
    "select of torch": lambda: winnow.select(torch.from_numpy(logits), 2**33),
    "select of an older torch": lambda: winnow.select(
        torch.from_numpy(logits).as_subclass(older), 2**33
    ),
}
for name, call in calls.items():
    try:
        print(name, "returned", call().shape)
    except (MemoryError, RuntimeError) as e:
        # torch's own functions say it with a RuntimeError
        print(name, "MemoryError" if "older" in name and "memory" in str(e) else type(e).__name__)
print(winnow.select(logits, 3).tolist())
"""


def test_memory_that_is_missing():
    """An array that cannot be made is a MemoryError, and the next call is served."""
    *calls, last = run(MEMORY).split("\n")
    assert [line.split()[-1] for line in calls] == ["MemoryError"] * 8, calls
    assert last == "[[0, 1, 2], [0, 1, 2]]"


DAEMON = """
import threading, time, numpy as np, winnow
cache = winnow.Cache(np.zeros((4, 64 * 656), np.uint8), "v32_fp8")
plan = winnow.Plan(heads=64, topk=256, pages=4)
plan.refill(np.arange(65, dtype=np.int32), np.full(64, 100, np.int32))
q, indices = np.zeros((64, 64, 576), np.uint16), np.zeros((64, 256), np.int32)
inside = threading.Event()

def attend():
    while True:
        inside.set()
        winnow.attend(q, cache, indices, scale=0.1, plan=plan)

threading.Thread(target=attend, daemon=True).start()
inside.wait()
time.sleep(0.1)
"""


@pytest.mark.parametrize("attempt", range(4))
def test_the_process_ends_beside_a_daemon_thread(attempt):
    """The thread is inside a call when the interpreter ends: status 0, nothing on stderr."""
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


SUBINTERPRETER = """
import numpy as np, winnow
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
logits = np.random.default_rng(0).random((3, 20), dtype=np.float32)
want = winnow.select(logits, 4)
code = (
    "try:\\n import winnow\\n print('imported', flush=True)\\n"
    "except ImportError as e:\\n print(e, flush=True)"
)
interpreters.run_string(interpreters.create(), code)
assert (winnow.select(logits, 4) == want).all()
try:
    winnow.select(logits, -4)
except ValueError:
    print("the first one goes on")
"""


def test_a_subinterpreter_is_refused():
    """nanobind's state is one per process: a second import would break the first."""
    refused, after = run(SUBINTERPRETER).split("\n")
    assert "subinterpreter" in refused
    assert after == "the first one goes on"


def test_a_forked_process_has_workers_of_its_own():
    """Threads do not survive fork(): a child that waits for its parent's would never return."""
    said = run(
        """
        import os, threading
        import numpy as np
        import winnow

        rows = np.random.default_rng(0).integers(0, 2**14, (4096, 512)).astype(np.uint16)
        q, cache = rows[:64].reshape(16, 4, 512), winnow.Cache(rows, "v4_bf16")
        ids = np.arange(16 * 512, dtype=np.int32).reshape(16, 512) % 4096
        attend = lambda: winnow.attend(q, cache, ids, scale=0.01)
        wanted = attend()
        busy = True

        def others():
            while busy:
                attend()

        thread = threading.Thread(target=others)
        thread.start()
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0 if np.array_equal(attend(), wanted) else 1)
            print(os.waitpid(child, 0)[1])
        busy = False
        thread.join()
        """
    )
    assert said.split() == ["0"] * 5
