# SPDX-License-Identifier: MIT
"""Routing centroids during training: moving average, k-means, the same on all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import accumulator

_SMOOTHING = 1e-5  # as in src/cpu/centroid_update.cc


class Centroids(NamedTuple):
    """Buffers of h key heads: centroids and sums (h, C, D), counts (h, C)."""

    centroids: Tensor
    counts: Tensor
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
def ema_update(
    state: Centroids, tokens: Tokens, decay: float, process_group: dist.ProcessGroup | None = None
) -> None:
    """One step of the moving average, in place; over the tokens of all ranks."""
    if not _distributed(process_group):
        torch.ops.coterie.ema_update(*state, *tokens, None, decay)
        return
    # With decay 0 the core's counts and sums are those of the batch.
    members, sums = torch.zeros_like(state.counts), torch.zeros_like(state.sums)
    scratch = state.centroids.clone()
    torch.ops.coterie.ema_update(scratch, members, sums, *tokens, None, 0.0)
    dist.all_reduce(members, group=process_group)
    dist.all_reduce(sums, group=process_group)
    state.counts.lerp_(members, 1 - decay)
    state.sums.lerp_(sums, 1 - decay)
    total = state.counts.sum(1, keepdim=True)
    smoothed = (state.counts + _SMOOTHING) / (total + state.counts.shape[1] * _SMOOTHING) * total
    moved = state.sums / smoothed.unsqueeze(-1)
    state.centroids.copy_(torch.where(members.unsqueeze(-1) > 0, moved, state.centroids))


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
    """Centroids by spherical k-means of the tokens of rank 0, in place; counts and sums restart."""
    rows, lengths = zip(*(_fold_heads(t, state.centroids.shape[0]) for t in tokens), strict=True)
    # Once in a training run: the core has it for the CPU only.
    found = torch.ops.coterie.spherical_kmeans(
        torch.cat(rows).cpu(), torch.cat(lengths).cpu(), None, state.centroids.shape[1], 10, seed
    ).to(state.centroids.device)
    if _distributed(process_group):
        dist.broadcast(found, 0, group=process_group)
    state.centroids.copy_(found)
    state.counts.fill_(1.0)
    state.sums.copy_(found)


def commitment(tokens: Tokens, centroids: Tensor) -> Tensor:
    """Mean square distance of normalised tokens from their centroids, differentiable; a scalar."""
    wide = centroids.to(accumulator(tokens.x.dtype))
    loss: Tensor = torch.ops.coterie.commitment_loss(tokens.x, wide, *tokens[1:], None)
    return loss.squeeze(0)
