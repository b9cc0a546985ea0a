"""The request and the visible context of each token of a step, computed where vLLM's device has the
lengths: one launch, at the same addresses in every step, as a CUDA graph asks for. And what the
layers of a step have in common."""

import torch
from vllm.forward_context import get_forward_context
from vllm.triton_utils import tl, triton


@triton.jit(do_not_specialize=["tokens", "count", "halvings"])
def _tokens_kernel(
    starts,  # [count + 1] int32: where each request's tokens begin
    lengths,  # [count] int32: tokens of each request, those of this step among them
    requests,  # [tokens] int32, out
    ends,  # [tokens] int32, out
    tokens,
    count,
    halvings,
    WITH_ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    # The first request that ends behind the token, found by halving.
    low = tl.zeros([BLOCK], dtype=tl.int32)
    high = low + count - 1
    for _ in range(halvings):
        middle = (low + high) // 2
        behind = tl.load(starts + middle + 1) > token
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, tl.minimum(middle + 1, high))
    tl.store(requests + token, low, mask=live)
    if WITH_ENDS:
        context = tl.load(lengths + low) - tl.load(starts + low + 1)
        seen = tl.where(token < tl.load(starts + count), context + token + 1, 0)
        tl.store(ends + token, seen, mask=live)


def _by_torch(common, requests: torch.Tensor, ends: torch.Tensor | None) -> None:
    tokens = torch.arange(common.num_actual_tokens, dtype=torch.int32, device=requests.device)
    starts = common.query_start_loc[: common.num_reqs + 1]
    torch.searchsorted(starts[1:], tokens, right=True, out_int32=True, out=requests)
    requests.clamp_(max=common.num_reqs - 1)
    if ends is not None:
        context = common.seq_lens[: common.num_reqs] - starts[1:]
        seen = context[requests.long()] + tokens + 1
        ends.copy_(torch.where(tokens < starts[-1], seen, 0))


def _by_triton(common, requests: torch.Tensor, ends: torch.Tensor | None) -> None:
    block = 256
    _tokens_kernel[(triton.cdiv(common.num_actual_tokens, block),)](
        common.query_start_loc,
        common.seq_lens,
        requests,
        requests if ends is None else ends,
        common.num_actual_tokens,
        common.num_reqs,
        (common.num_reqs - 1).bit_length(),
        WITH_ENDS=ends is not None,
        BLOCK=block,
    )


def fill_tokens(common, requests: torch.Tensor, ends: torch.Tensor | None = None) -> None:
    """For every token of the step: its request, and how many tokens of its context it may see,
    into the first elements of two buffers.

    A token sees what its request had before this step, and this step up to itself. Tokens behind
    the last request pad a CUDA graph's batch; they get the last request and see nothing.
    """
    tokens = common.num_actual_tokens
    requests = requests[:tokens]
    ends = None if ends is None else ends[:tokens]
    if tokens == 0:
        return
    (_by_triton if requests.is_cuda else _by_torch)(common, requests, ends)


def once_a_step(name, device: torch.device, make):
    """make(), or what it gave an earlier layer of the same step. What was made outside a CUDA
    graph is made again inside of it, where a replay has to make it."""
    made = vars(get_forward_context()).setdefault("made_by_winnow", {})
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    key = (name, capturing)
    if key not in made:
        made[key] = make()
    return made[key]


def choose_all(ends: torch.Tensor, out: torch.Tensor) -> None:
    """Into each row of out the ids 0 to ends - 1, then -1: a top-k where nothing is left out. Once
    a step, since the layers share the rows."""

    def fill():
        ids = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
        out.copy_(ids).masked_fill_(ids >= ends.unsqueeze(1), -1)

    once_a_step(("all ids", out.data_ptr(), out.shape), out.device, fill)
