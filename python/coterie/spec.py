# SPDX-License-Identifier: MIT
"""Attention specs: one string that names the attention of a layer.

``"full"``, ``"i-clustered(clusters=100,topk=32)"``,
``"4*local(window=256)+4*routing(clusters=16,window=256)"``; ``python -m coterie.info`` lists names
and keys.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from . import library


@dataclass(frozen=True)
class Group:
    """Heads of a layer that share a mechanism, with the core's facts about it."""

    name: str
    text: str  # the spec of this group alone, without its number of heads
    first: int  # of the layer's query heads
    heads: int
    first_kv: int  # of its key/value heads
    kv_heads: int
    first_key: int  # of the key heads of groups that take keys
    key_heads: int
    positions: str  # rotary, relative or none
    positions_named: bool  # named in the spec, not a default
    keys_are_queries: bool  # takes no k
    selects_together: bool  # one selection for all heads
    takes_mask: bool  # supports a separate mask for each query
    rows: str  # plain, unit_keys or normalised
    causality: str  # none, strict, or leaking: the selection sees later positions
    parameters: dict[str, str]  # the keys of the spec
    saved: dict[str, dict[str, list[str]]]  # by device and name: kind and formulas of the sizes
    state: dict[str, list[str]]  # by name: required or optional, and formulas of the sizes

    def saved_on(self, like: Tensor) -> dict[str, list[str]]:
        """What a forward pass saves on the device of a tensor."""
        return self.saved["cuda" if like.is_cuda else "cpu"]

    def whole(self, key: str) -> int:
        """An integer parameter."""
        return int(self.parameters[key])

    def number(self, key: str) -> float:
        """A floating-point parameter."""
        return float(self.parameters[key])


def _part(facts: dict[str, str], prefix: str) -> dict[str, str]:
    """The facts whose names begin with ``prefix``, without it."""
    return {k.removeprefix(prefix): v for k, v in facts.items() if k.startswith(prefix)}


def _lists(facts: dict[str, str], prefix: str) -> dict[str, list[str]]:
    return {name: text.split(",") for name, text in _part(facts, prefix).items()}


def _group(facts: dict[str, str]) -> Group:
    read: dict[Any, Any] = {"str": str, "int": int, "bool": lambda text: text == "1"}
    plain = {f.name: read[f.type](facts[f.name]) for f in fields(Group) if f.type in read}
    return Group(
        **plain,
        parameters=_part(facts, "key."),
        saved={device: _lists(facts, f"saved.{device}.") for device in ("cpu", "cuda")},
        state=_lists(facts, "state."),
    )


@functools.lru_cache(maxsize=1024)
def _groups(spec: str, heads: int, kv_heads: int, causal: bool) -> tuple[Group, ...]:
    return tuple(_group(facts) for facts in library.describe(spec, heads, kv_heads, causal))


@torch.compiler.assume_constant_result
def _constant_groups(spec: str, heads: int, kv_heads: int, causal: bool) -> tuple[Group, ...]:
    return _groups(spec, heads, kv_heads, causal)


def head_groups(
    spec: str, heads: int, causal: bool, kv_heads: int | None = None
) -> tuple[Group, ...]:
    """The groups of ``spec`` in a layer of ``heads`` query heads.

    ``kv_heads``: key/value heads, ``heads`` by default. Raises ValueError that names what is
    allowed if the spec is wrong, its heads do not add up, or a mechanism has no causal form.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if not isinstance(spec, str):
        raise TypeError(f"spec: expected a string; got {type(spec).__name__}")
    if torch.compiler.is_compiling():
        # operator.index makes torch.compile specialise on the numbers of heads.
        counts = operator.index(heads), operator.index(kv_heads)
        constant: tuple[Group, ...] = _constant_groups(spec, *counts, causal)
        return constant
    return _groups(spec, heads, kv_heads, causal)


def single_group(mechanism: str, causal: bool) -> Group:
    """The only group of a spec, as in a layer with one head."""
    return _groups(mechanism, 1, 1, causal)[0]
