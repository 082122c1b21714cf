# SPDX-License-Identifier: MIT
"""Routing centroids during training: moving average, k-means, the same on all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import accumulator
from .library import operators


class Centroids(NamedTuple):
    """Buffers of h key heads: centroids and sums (h, C, D), counts (h, C)."""

    centroids: Tensor
    counts: Tensor
    sums: Tensor


class Statistics(NamedTuple):
    """Token counts of clusters, (h, C), and sums of the normalised rows, (h, C, D); float64."""

    members: Tensor
    sums: Tensor


def no_statistics(state: Centroids) -> Statistics:
    """The statistics of zero tokens."""
    return Statistics(state.counts.double() * 0, state.sums.double() * 0)


class Tokens(NamedTuple):
    """Queries or keys of a pass with their nearest centroids: x (B, h, N, D), labels (B, h, N)."""

    x: Tensor
    labels: Tensor
    lengths: Tensor | None


def _distributed(process_group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


@torch.no_grad()
def nearest(x: Tensor, centroids: Tensor, lengths: Tensor | None) -> Tensor:
    """Labels (B, h, N) of x: the centroid with the largest product with each normalised row.

    -1 in padding. Strict routing selects the same clusters.
    """
    wide = centroids.to(accumulator(x.dtype)).contiguous()
    found: Tensor = operators.routing_labels(x, wide, lengths, None)
    return found


@torch.no_grad()
def add_statistics(before: Statistics, tokens: Tokens) -> Statistics:
    """The sum of ``before`` and the statistics of a pass."""
    sum_of_all = Statistics(*(total.clone() for total in before))
    operators.add_centroid_statistics(*sum_of_all, *tokens, None)
    return sum_of_all


@torch.no_grad()
def move(
    state: Centroids,
    statistics: Statistics | None,
    decay: float,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """One step of the moving average, in place.

    Averages over the tokens of all ranks; a rank without tokens passes None.
    """
    if _distributed(process_group):
        statistics = statistics or no_statistics(state)
        for total in statistics:
            dist.all_reduce(total, group=process_group)
    if statistics is None:
        return
    wide = [buffer.to(accumulator(buffer.dtype)) for buffer in state]
    operators.move_centroids(*wide, *statistics, decay)
    for buffer, moved in zip(state, wide, strict=True):
        buffer.copy_(moved)  # casts back for low precision; and autograd sees the change


def _fold_heads(tokens: Tokens, heads: int) -> tuple[Tensor, Tensor]:
    """The tokens with heads that share a key head as batch entries, and their lengths."""
    x, _, lengths = tokens
    sharing = x.shape[1] // heads
    folded = x.view(x.shape[0], heads, sharing, *x.shape[2:]).transpose(1, 2).flatten(0, 1)
    if lengths is None:
        lengths = torch.full((x.shape[0],), x.shape[2], device=x.device)
    return folded, lengths.to(torch.int32).repeat_interleave(sharing)


@torch.no_grad()
def initialise(
    state: Centroids,
    tokens: list[Tokens],
    seed: int,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Sets the centroids by spherical k-means of the tokens of the group's first rank, in place.

    Resets counts and sums.
    """
    rows, lengths = zip(*(_fold_heads(t, state.centroids.shape[0]) for t in tokens), strict=True)
    # On the CPU, the only device for which the core has it; it runs once per training.
    found = operators.spherical_kmeans(
        torch.cat(rows).cpu(), torch.cat(lengths).cpu(), None, state.centroids.shape[1], 10, seed
    ).to(state.centroids.device)
    if _distributed(process_group):
        dist.broadcast(found, group=process_group, group_src=0)
    state.centroids.copy_(found)
    state.counts.fill_(1.0)
    state.sums.copy_(found)


def commitment(tokens: Tokens, centroids: Tensor) -> Tensor:
    """Mean square distance of normalised tokens from their centroids, differentiable; a scalar."""
    wide = centroids.to(accumulator(tokens.x.dtype))
    loss: Tensor = operators.commitment_loss(tokens.x, wide, *tokens[1:], None)
    return loss.squeeze(0)
