# SPDX-License-Identifier: MIT
"""Attention specs: one string that names the attention of a layer.

``"full"``, ``"i-clustered(clusters=100,topk=32)"``,
``"4*local(window=256)+4*routing(clusters=16,window=256)"``; ``python -m coterie.info`` lists names
and keys.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field

import torch

from . import library

_MASKED = ("full", "local", "strided", "oracle-top")


@dataclass(frozen=True)
class Group:
    """Heads of a layer that share a mechanism; parameters as in ``include/coterie/params.h``."""

    name: str
    text: str  # the spec of this group alone, without its number of heads
    heads: int
    positions: str  # rotary, relative or none
    positions_named: bool  # in the spec, and not by default
    keys_are_queries: bool  # takes no k
    causality: str  # none, strict, or leaking: the selection sees later positions
    parameters: dict[str, str] = field(default_factory=dict)

    def whole(self, key: str) -> int:
        """An integer parameter."""
        return int(self.parameters[key])

    def number(self, key: str) -> float:
        """A number that need not be whole."""
        return float(self.parameters[key])

    @property
    def takes_mask(self) -> bool:
        """Whether each query may have a mask of its own."""
        return self.name in _MASKED


def _group(facts: dict[str, str]) -> Group:
    return Group(
        name=facts.pop("name"),
        text=facts.pop("text"),
        heads=int(facts.pop("heads")),
        positions=facts.pop("positions"),
        positions_named=facts.pop("positions_named") == "1",
        keys_are_queries=facts.pop("keys_are_queries") == "1",
        causality=facts.pop("causality"),
        parameters=facts,
    )


@functools.lru_cache(maxsize=1024)
def _groups(spec: str, heads: int, causal: bool) -> tuple[Group, ...]:
    return tuple(_group(facts) for facts in library.describe(spec, heads, causal))


@torch.compiler.assume_constant_result
def _constant_groups(spec: str, heads: int, causal: bool) -> tuple[Group, ...]:
    return _groups(spec, heads, causal)


def head_groups(spec: str, heads: int, causal: bool) -> tuple[Group, ...]:
    """The groups of ``spec`` in a layer of ``heads`` heads.

    Raises ValueError, naming what is allowed, when the spec is wrong, its heads do not add up, or
    a mechanism has no causal form.
    """
    if not isinstance(spec, str):
        raise TypeError(f"spec: expected a string; got {type(spec).__name__}")
    if torch.compiler.is_compiling():
        # An index: there is no graph for all counts of heads.
        constant: tuple[Group, ...] = _constant_groups(spec, operator.index(heads), causal)
        return constant
    return _groups(spec, heads, causal)


def single_group(mechanism: str, causal: bool) -> Group:
    """The group of a spec that has one, whatever its number of heads."""
    return _groups(mechanism, 1, causal)[0]
