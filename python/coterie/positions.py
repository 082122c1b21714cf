# SPDX-License-Identifier: MIT
"""Positions as rotations of rows (include/coterie/positions.h); rows are (B, h, N, D)."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import operators


def rotated(rows: Tensor, base: float) -> Tensor:
    """Elements d and d + D/2 of each row turned by the angle of its position."""
    turned: Tensor = operators.rotate_rows(rows, 0, base, False)
    return turned


def widened_queries(q: Tensor, weight: Tensor, bias: Tensor, base: float) -> Tensor:
    """Queries with F more elements, whose product with those of the keys is the relative term
    (weight q + bias) . r of the logits; weight (F, D), bias (h, F). torch/src/positions.h."""
    a, c = (torch.nn.functional.linear(q, weight) + bias[:, None]).to(q.dtype).chunk(2, -1)
    return torch.cat([q, rotated(torch.cat([c, -a], -1), base)], -1)


def widened_keys(k: Tensor, width: int, base: float) -> Tensor:
    """Keys with the cosines and sines of their positions."""
    ones = k.new_ones((1, 1, k.shape[2], width // 2))
    waves = rotated(torch.cat([ones, torch.zeros_like(ones)], -1), base)
    return torch.cat([k, waves.expand(*k.shape[:3], width)], -1)
