# SPDX-License-Identifier: MIT
"""Shapes of the tensors that a forward pass saves, from formulas; sizes may be symbolic."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .spec import Group


class Saved(NamedTuple):
    """One saved tensor: int32 if it is ``whole``, otherwise of the accumulator's type.

    Indices in a selection count from the start of the item, and are -1 in empty slots.
    """

    name: str
    shape: Sequence[int]
    selection: bool
    whole: bool


def sizes_of(group: Group, q: Tensor, v: Tensor, cu_seqlens_q: Tensor | None) -> dict[str, int]:
    """The sizes of a call by the names that formulas use; does not check shapes."""
    B, H, N, Dk = q.shape
    value_heads, S, Dv = v.shape[1:]
    return {
        "B": B,
        "H": H,
        "N": N,
        "S": S,
        "Dk": Dk,
        "Dv": Dv,
        "key_heads": H if group.keys_are_queries else value_heads,
        "value_heads": value_heads,
        "items": B if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
    }


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "*": operator.mul,
    "/": operator.floordiv,
    "min": torch.sym_min,
    "max": torch.sym_max,
}


def evaluate(formula: str, sizes: dict[str, int]) -> int:
    """The value of a formula in postfix notation: ``"32 S min"``."""
    stack: list[int] = []
    for word in formula.split():
        if word in _OPERATIONS:
            second = stack.pop()
            stack.append(_OPERATIONS[word](stack.pop(), second))
        else:
            stack.append(sizes[word] if word in sizes else int(word))
    return stack.pop()


def saved_layout(group: Group, sizes: dict[str, int], on_gpu: bool) -> list[Saved]:
    """The tensors that the mechanism of ``group`` saves, in order."""
    return [
        Saved(
            name,
            tuple(evaluate(formula, sizes) for formula in formulas),
            kind == "selection",
            kind != "value",
        )
        for name, (kind, *formulas) in group.saved["cuda" if on_gpu else "cpu"].items()
    ]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of everything that is accumulated or saved for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32
