# SPDX-License-Identifier: MIT
"""Routing centroids during training: moving average, k-means, the same on all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import accumulator

_SMOOTHING = 1e-5  # as in src/cpu/cluster/centroid_update.cc


class Centroids(NamedTuple):
    """Buffers of h key heads: centroids and sums (h, C, D), counts (h, C)."""

    centroids: Tensor
    counts: Tensor
    sums: Tensor


class Statistics(NamedTuple):
    """Tokens of each cluster, (h, C), and the sums of their normalised rows, (h, C, D); float64."""

    members: Tensor
    sums: Tensor


class Tokens(NamedTuple):
    """Queries or keys of a pass with their nearest centroids: x (B, h, N, D), labels (B, h, N)."""

    x: Tensor
    labels: Tensor
    lengths: Tensor | None


def _distributed(process_group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


@torch.no_grad()
def nearest(x: Tensor, centroids: Tensor, lengths: Tensor | None) -> Tensor:
    """Labels (B, h, N) of x: the centroids of largest product with normalised rows; -1 in padding.

    As strict routing selects, so that a row has the same cluster everywhere.
    """
    wide = centroids.to(accumulator(x.dtype)).contiguous()
    spec = f"routing(clusters={centroids.shape[1]},window=1,share_qk=true,causal=strict)"
    rows = (x, None, x[:, : centroids.shape[0]], wide, None, None)
    lengths_and_mask = (lengths, lengths, None, None, None)
    found: list[Tensor] = torch.ops.coterie.attention_select(
        *rows, *lengths_and_mask, spec, 0.0, True, 0
    )
    return found[0]


@torch.no_grad()
def statistics(tokens: Tokens, centroids: Tensor) -> Statistics:
    """What a pass adds to the moving average."""
    # With decay 0 the core's counts and sums become those of the tokens.
    scratch = centroids.to(accumulator(tokens.x.dtype), copy=True)
    members, sums = torch.zeros_like(scratch[..., 0]), torch.zeros_like(scratch)
    torch.ops.coterie.ema_update(scratch, members, sums, *tokens, None, 0.0)
    return Statistics(members.double(), sums.double())


@torch.no_grad()
def ema_update(
    state: Centroids,
    statistics: Statistics | None,
    decay: float,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """One step of the moving average, in place, as src/cpu/cluster/centroid_update.cc has it.

    Over the tokens of all ranks; a rank without any gives None.
    """
    distributed = _distributed(process_group)
    if statistics is None:
        if not distributed:
            return
        statistics = Statistics(state.counts.double() * 0, state.sums.double() * 0)
    members, sums = statistics
    if distributed:
        dist.all_reduce(members, group=process_group)
        dist.all_reduce(sums, group=process_group)
    state.counts.copy_(decay * state.counts.double() + (1 - decay) * members)
    moved = decay * state.sums.double() + (1 - decay) * sums
    state.sums.copy_(moved)
    counts = state.counts.double()
    total = counts.sum(1, keepdim=True)
    smoothed = (counts + _SMOOTHING) / (total + counts.shape[1] * _SMOOTHING) * total
    found = members.unsqueeze(-1) > 0
    state.centroids.copy_(torch.where(found, moved / smoothed.unsqueeze(-1), state.centroids))


def _fold_heads(tokens: Tokens, heads: int) -> tuple[Tensor, Tensor]:
    """Heads that share a key head as more batch entries, and their lengths."""
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
    """Centroids by spherical k-means of the tokens of the group's first rank, in place.

    Counts and sums restart.
    """
    rows, lengths = zip(*(_fold_heads(t, state.centroids.shape[0]) for t in tokens), strict=True)
    # Once in a training run: the core has it for the CPU only.
    found = torch.ops.coterie.spherical_kmeans(
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
    loss: Tensor = torch.ops.coterie.commitment_loss(tokens.x, wide, *tokens[1:], None)
    return loss.squeeze(0)
