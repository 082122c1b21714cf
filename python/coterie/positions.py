# SPDX-License-Identifier: MIT
"""Positions by sines and cosines, as torch/src/positions.cc has them; rows are (B, N, h, D)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Waves(NamedTuple):
    """sin and cos of position * base^(-2 f / width), (N, 1, width / 2) for all heads."""

    sin: Tensor
    cos: Tensor


def _steps(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device, dtype=torch.float64)


def _waves(rows: Tensor, width: int, base: float) -> Waves:
    positions = _steps(rows.shape[1], rows.device)
    frequencies = torch.exp(_steps(width // 2, rows.device) * (-2 * math.log(base) / width))
    angles = (positions[:, None] * frequencies)[:, None]
    return Waves(angles.sin().to(rows.dtype), angles.cos().to(rows.dtype))


def rotated(rows: Tensor, base: float) -> Tensor:
    """Elements d and d + D/2 of each row turned by the angle of its position."""
    sin, cos = _waves(rows, rows.shape[-1], base)
    a, b = rows.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def widened_queries(q: Tensor, weight: Tensor, bias: Tensor, base: float) -> Tensor:
    """Queries with F more elements, whose product with those of the keys is the relative term
    (weight q + bias) . r of the logits; weight (F, D), bias (h, F)."""
    sin, cos = _waves(q, weight.shape[0], base)
    a, c = (torch.nn.functional.linear(q, weight) + bias).to(q.dtype).chunk(2, -1)
    return torch.cat([q, a * sin + c * cos, c * sin - a * cos], -1)


def widened_keys(k: Tensor, width: int, base: float) -> Tensor:
    """Keys with the sines and cosines of their positions."""
    sin, cos = _waves(k, width, base)
    features = torch.cat([cos, sin], -1)
    return torch.cat([k, features.expand(*k.shape[:3], width)], -1)
