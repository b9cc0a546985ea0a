"""winnow for PyTorch: custom operators, and whole attention layers.

``ops`` is ``torch.ops.winnow``, every operation as a custom operator (operators.py).
``MlaLayer`` (DeepSeek V3.2, GLM-5), ``V4Layer`` (DeepSeek V4) and ``V41Layer`` (V4.1) are
attention layers from the normalised hidden state to the layer's output, with a checkpoint's
weights; ``LayerCaches`` holds the paged caches and compressor states of all layers for many
requests. docs/layers.md explains both. Inference only.
"""

from winnow.torch.caches import LayerCaches, Records, State
from winnow.torch.mla import MlaConfig, MlaLayer
from winnow.torch.operators import ops
from winnow.torch.rope import Rope
from winnow.torch.step import Step
from winnow.torch.v4 import V4Config, V4Layer
from winnow.torch.v41 import V41Config, V41Layer
from winnow.torch.weights import Checkpoint

__all__ = [
    "Checkpoint",
    "LayerCaches",
    "MlaConfig",
    "MlaLayer",
    "Records",
    "Rope",
    "State",
    "Step",
    "V4Config",
    "V4Layer",
    "V41Config",
    "V41Layer",
    "ops",
]
