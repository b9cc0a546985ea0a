"""What the tests share: the device to run on, and the accuracy bar of attention."""

import pathlib

import pytest

torch = pytest.importorskip("torch")

import winnow  # noqa: E402

collect_ignore = ["engines"]  # `make engines-test`, in an environment with the engines

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "data" / "golden"


def devices_of(stage: str) -> list:
    """Parameters "cpu" and "cuda"; the second is skipped where this build or machine lacks it."""
    kernels = [k for k in winnow.support() if k.stage == stage and k.device == "cuda"]
    if not torch.cuda.is_available():
        why = "no CUDA device"
    elif not any(k.available for k in kernels):
        why = f"no CUDA kernel of {stage} in this build"
    else:
        why = None
    skip = [pytest.mark.skip(reason=why)] if why else []
    return ["cpu", pytest.param("cuda", marks=skip)]


def on(*stages: str):
    """Decorator: the test runs with device="cpu" and, where all stages have kernels, "cuda"."""
    last = [d for stage in stages for d in devices_of(stage) if not isinstance(d, str) and d.marks]
    return pytest.mark.parametrize("device", ["cpu", last[0] if last else "cuda"])


@pytest.fixture
def small(request):
    """q, a cache and indices for a small attend(), on the test's device."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    g = torch.Generator().manual_seed(0)
    memory = torch.zeros(winnow.cache_shape("v32_fp8", 4, 16), dtype=torch.uint8, device=device)
    cache = winnow.Cache(memory, "v32_fp8", 16)
    rows = torch.randn(64, 576, generator=g).bfloat16().to(device)
    winnow.write(rows, torch.arange(64, device=device), cache)
    q = torch.randn(2, 8, 576, generator=g).bfloat16().to(device)
    indices = torch.randint(0, 64, (2, 12), generator=g, dtype=torch.int32).to(device)
    return q, cache, indices


class Bar:
    """|got - want| below `absolute`, or below `relative` of |want|, or below 2^-7 of the magnitudes
    that cancel (tools/accuracy.h derives them); infinities match in place."""

    def __init__(self, absolute: float, relative: float, cosine: float = float("inf")):
        self.absolute, self.relative, self.cosine = absolute, relative, cosine

    def check(self, got, want, magnitude=None):
        got, want = got.detach().double().cpu(), want.detach().double().cpu()
        assert got.shape == want.shape
        finite = torch.isfinite(want)
        assert torch.equal(got[~finite], want[~finite]), "infinities do not match"
        bound = torch.maximum(torch.full_like(want, self.absolute), self.relative * want.abs())
        if magnitude is not None:
            bound = torch.maximum(bound, magnitude.double().cpu() * 2**-7)
        share = torch.where(finite, (got - want).abs() / bound, torch.zeros_like(want))
        worst = share.flatten().argmax() if share.numel() else None
        if worst is not None:
            assert share.max() < 1, (
                f"element {int(worst)}: got {got.flatten()[worst]}, want {want.flatten()[worst]}, "
                f"{share.max():.3g} of its bound"
            )
            a, r = got[finite], want[finite]
            norm = (a * a).sum() + (r * r).sum()
            assert norm == 0 or 1 - 2 * (a * r).sum() / norm < self.cosine


DECODE_OUT = Bar(1e-3, 2.01 / 128, 5e-6)
DECODE_LSE = Bar(1e-6, 8.01 / 65536)
PREFILL_OUT = Bar(8e-4, 3.01 / 128, 7e-6)
PREFILL_LSE = Bar(1e-6, 2.01 / 65536)
