# Names that the signatures of the bindings use.
^_winnow\.__prefix__$:
    from collections.abc import Sequence
    from typing import Any

    Array = Any  # torch.Tensor, numpy.ndarray, or anything with DLPack
    Ints = Any  # an int32 array in host memory, or a sequence of ints
