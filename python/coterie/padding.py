# SPDX-License-Identifier: MIT
"""Padding anywhere, for kernels that take lengths only: valid rows move to the front."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Padding(NamedTuple):
    """``lengths`` (B): valid rows; ``order`` (B, N): row at each place, None if none moves."""

    lengths: Tensor
    order: Tensor | None

    def to_front(self, rows: Tensor, dim: int) -> Tensor:
        """Rows (B, ..., N, ...) with the valid ones first in ``dim``."""
        if self.order is None:
            return rows
        return torch.gather(rows, dim, _index(self.order, rows, dim))

    def back(self, rows: Tensor, dim: int) -> Tensor:
        """The reverse of to_front."""
        if self.order is None:
            return rows
        return torch.empty_like(rows).scatter(dim, _index(self.order, rows, dim), rows)


def _index(order: Tensor, rows: Tensor, dim: int) -> Tensor:
    shape = [1] * rows.dim()
    shape[0], shape[dim] = order.shape
    return order.view(shape).expand(rows.shape)


def make_padding(valid_BN: Tensor) -> Padding:
    """From a bool tensor, True in valid rows; does not synchronise with the device."""
    lengths = valid_BN.sum(1, dtype=torch.int32)
    if valid_BN.device.type == "cpu" and not torch.compiler.is_compiling():
        positions = torch.arange(valid_BN.shape[1])
        if torch.equal(valid_BN, positions < lengths[:, None]):
            return Padding(lengths, None)
    return Padding(lengths, torch.argsort(~valid_BN, dim=1, stable=True))
