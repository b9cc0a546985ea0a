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
_BLOCKS = (128, 64, 32, 16)


class Checkpoint(Mapping):
    """The tensors of a folder of safetensors files, read when they are asked for."""

    def __init__(self, folder: str | pathlib.Path):
        self.folder = pathlib.Path(folder)
        index = self.folder / "model.safetensors.index.json"
        self.files: dict[str, str] = _files_of(index) if index.exists() else self._list_files()
        if not self.files:
            raise FileNotFoundError(f"checkpoint: folder: no safetensors files in {folder}")

    def _list_files(self) -> dict[str, str]:
        files: dict[str, str] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with _open(path) as file:
                for name in file.keys():
                    if name in files:
                        raise ValueError(
                            f"checkpoint: {name} is in {files[name]} and in {path.name}, and there "
                            f"is no {self.folder / 'model.safetensors.index.json'}"
                        )
                    files[name] = path.name
        return files

    def __getitem__(self, name: str) -> Tensor:
        path = self.folder / self.files[name]
        with _open(path) as file:
            if name not in file.keys():
                raise KeyError(f"checkpoint: {name} is not in {path}, where the index has it")
            return file.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        """Without reading the tensor, as a Mapping would."""
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def _files_of(index: pathlib.Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint: {index}: expected JSON with a weight_map") from error
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"checkpoint: {index}: weight_map: expected a file's name for each tensor")
    return files


def _open(path: pathlib.Path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"checkpoint: {path}: {error}") from error


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [rows, columns] e4m3 times scale [row blocks, column blocks], rounded to bf16.

    Scales are floats, or ue8m0 (uint8 in files of older writers). The block's size follows from the
    shapes: 128 x 128 in V3.2, GLM and V4, 32 x 32 in V4.1.
    """
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if scale.dtype not in (*_PLAIN, torch.float8_e8m0fnu):
        raise NotImplementedError(
            f"weights: scale: expected floats or ue8m0, found {scale.dtype} (packed scales are not "
            "served)"
        )
    size = _block_of(weight, scale)
    full = scale.float().repeat_interleave(size, 0).repeat_interleave(size, 1)
    return (weight.float() * full[: weight.shape[0], : weight.shape[1]]).bfloat16()


def _block_of(weight: Tensor, scale: Tensor) -> int:
    for size in _BLOCKS:
        if list(scale.shape) == [-(-n // size) for n in weight.shape]:
            return size
    blocks = ", ".join(f"ceil({n} / 128)" for n in weight.shape)
    raise ValueError(f"weights: scale: expected [{blocks}] blocks, found {list(scale.shape)}")


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

    def _read(self, name: str, shape: tuple[int, ...]) -> tuple[str, Tensor]:
        found = self._find(name)
        if found is None:
            raise KeyError(f"weights: {self.prefix}{name} is missing")
        weight = self.tensors[found]
        if not isinstance(weight, Tensor):
            raise TypeError(
                f"weights: {found}: expected a torch.Tensor, found {type(weight).__name__}"
            )
        if list(weight.shape) != list(shape):
            raise ValueError(
                f"weights: {found}: expected {list(shape)}, found {list(weight.shape)}"
            )
        if weight.is_meta and self.device is None:
            raise ValueError(f"weights: {found}: it is on the meta device and has no values")
        return found, weight.detach().to(self.device)

    def _scale(self, found: str) -> str | None:
        """The name of the block scales beside a matrix."""
        names = [found.removesuffix("weight") + ending for ending in _SCALES]
        return next((name for name in names if name in self.tensors), None)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A vector or table that is never quantised, in fp32: norms, biases, sinks."""
        found, weight = self._read(name, shape)
        if weight.dtype not in _PLAIN:
            raise NotImplementedError(
                f"weights: {found}: expected bf16, fp16 or fp32, found {weight.dtype}"
            )
        return weight.float().contiguous()

    def matrix(self, module: str, rows: int, columns: int) -> Tensor:
        """`module`.weight [rows, columns] in bf16."""
        if self._find(f"{module}.bias") is not None:
            raise NotImplementedError(f"weights: {self.prefix}{module}.bias: expected none")
        found, weight = self._read(f"{module}.weight", (rows, columns))
        scale = self._scale(found)
        if weight.dtype in _PLAIN:
            if scale is not None:
                # A model of e4m3 weights that .to(dtype) went over has the bare codes as values.
                raise ValueError(
                    f"weights: {found}: expected e4m3, since {scale} is beside it, found "
                    f"{weight.dtype}"
                )
            return weight.bfloat16().contiguous()
        if weight.dtype != torch.float8_e4m3fn:
            raise NotImplementedError(
                f"weights: {found}: expected bf16, fp16, fp32 or e4m3 with block scales, found "
                f"{weight.dtype}"
            )
        if scale is None:
            raise KeyError(
                f"weights: {found} is e4m3, and has none of {', '.join(_SCALES)} beside it"
            )
        return dequantize(weight, self.tensors[scale].to(self.device))
