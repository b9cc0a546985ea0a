"""Which version of vLLM the tests run beside."""

import vllm


def since(*minor: int) -> bool:
    """Whether it is this version or a later one."""
    return tuple(int(part) for part in vllm.__version__.split(".")[:2]) >= minor
