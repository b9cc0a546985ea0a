"""RoPE's parameters as a model's configuration names them, and tables that grow with positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from winnow import _winnow

PAIRS = 32  # of 64 values: what every model here rotates


@dataclass(frozen=True)
class Rope:
    """Base, and YaRN's parameters where `factor` is above 1."""

    theta: float
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @classmethod
    def of(cls, parameters: dict, theta: float | None = None) -> Rope:
        """From `rope_parameters` (or `rope_scaling`, with the base as `theta`) of a config."""
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        base = float(parameters.get("rope_theta", theta))
        if kind == "default":
            return cls(base)
        if kind != "yarn":
            raise NotImplementedError(f"rope: rope_type: expected default or yarn, found {kind}")
        if not parameters.get("truncate", True):
            raise NotImplementedError("rope: truncate: expected True, found False")
        if _table_factor(parameters) != 1.0:
            raise NotImplementedError(
                "rope: attention_factor: expected 1 (the softmax scale carries YaRN's), found "
                f"{_table_factor(parameters):g}"
            )
        return cls(
            base,
            float(parameters["factor"]),
            int(parameters["original_max_position_embeddings"]),
            float(parameters.get("beta_fast") or 32),
            float(parameters.get("beta_slow") or 1),
        )


def mscale(factor: float, weight: float) -> float:
    """YaRN's 0.1 * weight * ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _table_factor(parameters: dict) -> float:
    """What cosines and sines would be multiplied by; 1 in all models here."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    one, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if one and all_dims:
        return mscale(parameters["factor"], one) / mscale(parameters["factor"], all_dims)
    # DeepSeek's own files have rope_scaling without these: V4's tables are not scaled.
    if "type" in parameters and "rope_type" not in parameters:
        return 1.0
    return mscale(parameters["factor"], 1.0)


class RopeTables:
    """One table for each Rope; its length is a power of two that covers the positions so far."""

    def __init__(self, device: torch.device):
        self.device = device
        self.positions = 0
        self.tables: dict[Rope, torch.Tensor] = {}

    def reserve(self, positions: int) -> None:
        if positions > self.positions:
            self.positions = max(1024, 1 << (positions - 1).bit_length())
            self.tables.clear()

    def table(self, rope: Rope) -> torch.Tensor:
        """[positions, 2, 32] f32."""
        if rope not in self.tables:
            out = torch.empty(self.positions, 2, PAIRS, dtype=torch.float32, device=self.device)
            _winnow.rope_table(
                out,
                theta=rope.theta,
                factor=rope.factor,
                original=rope.original,
                beta_fast=rope.beta_fast,
                beta_slow=rope.beta_slow,
            )
            self.tables[rope] = out
        return self.tables[rope]
