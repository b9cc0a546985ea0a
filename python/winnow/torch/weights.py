"""Weights of a checkpoint by their names: bf16 as they are, fp8 with block scales dequantised."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Names of block scales beside "<name>.weight": DeepSeek V3.2 and GLM, then V4.
_SCALES = ("weight_scale_inv", "scale")


class Checkpoint(Mapping):
    """The tensors of a folder of safetensors files, read when they are asked for."""

    def __init__(self, folder: str | pathlib.Path):
        self.folder = pathlib.Path(folder)
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            self.files = json.loads(index.read_text())["weight_map"]
        else:
            self.files = {}
            for path in sorted(self.folder.glob("*.safetensors")):
                with _open(path) as file:
                    self.files.update(dict.fromkeys(file.keys(), path.name))
        if not self.files:
            raise FileNotFoundError(f"checkpoint: folder: no safetensors files in {folder}")

    def __getitem__(self, name: str) -> Tensor:
        with _open(self.folder / self.files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def _open(path: pathlib.Path):
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [rows, columns] e4m3 times scale [row blocks, column blocks], rounded to bf16.

    The block's size follows from the shapes: 128 x 128 in V3.2, GLM and V4, 32 x 32 in V4.1.
    """
    if scale.dim() != 2:
        raise ValueError(
            f"weights: scale: expected [row blocks, column blocks], found {list(scale.shape)}"
        )
    size = [_block(n, blocks) for n, blocks in zip(weight.shape, scale.shape, strict=True)]
    full = scale.float().repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
    return (weight.float() * full[: weight.shape[0], : weight.shape[1]]).bfloat16()


def _block(n: int, blocks: int) -> int:
    for size in (128, 64, 32, 16):
        if -(-n // size) == blocks:
            return size
    raise ValueError(f"weights: scale: expected ceil({n} / 128) blocks, found {blocks}")


class Weights:
    """A layer's part of a checkpoint: names behind `prefix`, under their known spellings."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, device, aliases: dict):
        self.tensors, self.prefix = tensors, prefix
        self.device, self.aliases = device, aliases

    def _find(self, name: str) -> str | None:
        for spelling in (name, self.aliases.get(name, name)):
            if self.prefix + spelling in self.tensors:
                return self.prefix + spelling
        return None

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A vector or table that is never quantised: norms, biases, sinks."""
        found = self._find(name)
        if found is None:
            raise KeyError(f"weights: {self.prefix}{name} is missing")
        return self.tensors[found].detach().to(self.device, dtype).contiguous()

    def matrix(self, module: str, rows: int, columns: int) -> Tensor:
        """`module`.weight [rows, columns] in bf16."""
        if self._find(f"{module}.bias") is not None:
            raise NotImplementedError(f"weights: {self.prefix}{module}.bias: expected none")
        found = self._find(f"{module}.weight")
        if found is None:
            raise KeyError(f"weights: {self.prefix}{module}.weight is missing")
        weight = self.tensors[found].detach().to(self.device)
        if list(weight.shape) != [rows, columns]:
            raise ValueError(
                f"weights: {found}: expected [{rows}, {columns}], found {list(weight.shape)}"
            )
        if weight.dtype in _PLAIN:
            return weight.bfloat16().contiguous()
        if weight.dtype != torch.float8_e4m3fn:
            raise NotImplementedError(
                f"weights: {found}: expected bf16, fp16, fp32 or e4m3 with block scales, found "
                f"{weight.dtype}"
            )
        for ending in _SCALES:
            name = found.removesuffix("weight") + ending
            if name in self.tensors:
                return dequantize(weight, self.tensors[name].to(self.device))
        raise KeyError(f"weights: {found} is e4m3, and has none of {', '.join(_SCALES)} beside it")
