# SPDX-License-Identifier: MIT
"""Learned tensors of mechanisms: centroids of routing, surrogate tokens of CAST."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .library import group_seed, operators
from .spec import Group, head_groups


class State(NamedTuple):
    """Learned tensors of one head group of h query heads and h' key/value heads.

    routing: ``centroids`` (h', C, D), ``counts`` (h', C) and ``sums`` (h', C, D) are moved by
    :func:`coterie.nn.update_centroids`, not by gradients; ``logit_scale`` (h), optional, is a
    parameter. cast: ``surrogates`` (h, C, D) are parameters, ``gate`` (B, N) has the gate logits
    of a call: ``state._replace(gate=logits)``.
    """

    centroids: Tensor | None = None
    counts: Tensor | None = None
    sums: Tensor | None = None
    logit_scale: Tensor | None = None
    surrogates: Tensor | None = None
    gate: Tensor | None = None


def group_state(group: Group, head_dim: int, seed: int) -> State:
    """The initial state of a group: Gaussian, drawn as in the C++ modules."""
    generator = torch.Generator().manual_seed(seed % 2**64)
    scale = 1 / math.sqrt(head_dim)
    if group.name == "routing":
        clusters = group.whole("clusters")
        drawn = torch.randn(group.kv_heads, clusters, head_dim, generator=generator)
        centroids = operators.normalise_rows(drawn[None])[0]
        counts = torch.ones(group.kv_heads, clusters)
        logit_scale = torch.full((group.heads,), scale)
        return State(centroids, counts, centroids.clone(), logit_scale)
    if group.name == "cast":
        drawn = torch.randn(group.heads, group.whole("clusters"), head_dim, generator=generator)
        return State(surrogates=drawn * scale)
    return State()


def init_state(
    spec: str,
    num_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    causal: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> State | tuple[State, ...]:
    """Initial parameters of the mechanisms of a spec, for the argument ``state``.

    One :class:`State` for a spec of one group, otherwise a tuple with one for each group. ``dtype``
    is float32, or float64 for inputs of float64. Gaussian centroids are for tests; training
    starts better from :func:`torch.ops.coterie.spherical_kmeans` of the data
    (:func:`coterie.nn.initialise_centroids`).
    """
    if head_dim < 1:
        raise ValueError(f"head_dim: expected at least 1; got {head_dim}")
    states = []
    for number, group in enumerate(head_groups(spec, num_heads, causal, num_kv_heads)):
        state = group_state(group, head_dim, group_seed(seed, 0, number))
        states.append(State(*(None if t is None else t.to(device, dtype) for t in state)))
    return states[0] if len(states) == 1 else tuple(states)
