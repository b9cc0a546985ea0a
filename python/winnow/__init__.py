"""Sparse MLA attention: write -> plan -> score -> select -> locate -> attend.

Arrays of PyTorch, NumPy, JAX and CuPy pass without copies; results are made in the library of the
arguments (for JAX in NumPy or CuPy), on their device, and CUDA work goes to the current stream.
``winnow.torch`` has the operations for ``torch.compile`` and whole layers, ``winnow.flash_mla``
FlashMLA's interface, ``winnow.hf`` attention for transformers and whole models on winnow's layers.
"""

from winnow._winnow import *  # noqa: F403
from winnow._winnow import __version__ as __version__
