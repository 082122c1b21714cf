# SPDX-License-Identifier: MIT
"""k-means of rows, many problems at once."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .layout import accumulator
from .library import operators

_STARTS = ("given", "random", "k-means++")  # as coterie/kmeans.h numbers them


class KMeans(NamedTuple):
    """Centroids (..., C, D), labels (..., N) and counts (..., C), both int32."""

    centroids: Tensor
    labels: Tensor
    counts: Tensor


@torch.no_grad()
def kmeans(
    x: Tensor,
    clusters: int | None = None,
    iterations: int = 10,
    init: Literal["random", "k-means++"] = "random",
    *,
    centroids: Tensor | None = None,
    fill_empty: bool = False,
    seed: int = 0,
) -> KMeans:
    """Clusters the rows of x in Euclidean distance by Lloyd's iterations.

    Deterministic: equal inputs and seeds give equal bits. On a GPU nothing waits for the device.

    Args:
        x: rows (..., N, D), a problem for each of the leading sizes; float32, bfloat16, float16, or
            float64 on the CPU. On a GPU up to 128 elements a row.
        clusters: number of clusters of a problem; with ``centroids`` it is theirs.
        iterations: assignments with an update of the centroids; labels are those of the centroids
            that are returned. 0 only assigns.
        init: distinct random rows, or rows drawn by their distance to those drawn before.
        centroids: (..., C, D) to start from instead.
        fill_empty: an empty cluster takes the row that is farthest from its centroid; otherwise it
            keeps its centroid.
        seed: seed of the start.

    Returns:
        Centroids of float32 (float64 for float64), labels, and rows per cluster. Rows that are not
        finite have label -1 and no part in anything.
    """
    if x.dim() < 2:
        raise ValueError(f"x: expected rows (..., N, D); got {tuple(x.shape)}")
    problems = x.shape[:-2]
    rows = x.reshape(problems.numel(), *x.shape[-2:])
    if centroids is not None:
        if centroids.dim() < 2 or (*centroids.shape[:-2], centroids.shape[-1]) != (
            *problems,
            x.shape[-1],
        ):
            raise ValueError(
                f"centroids: expected (..., C, D) for x {tuple(x.shape)}; got "
                f"{tuple(centroids.shape)}"
            )
        if clusters not in (None, centroids.shape[-2]):
            raise ValueError(
                f"clusters: expected {centroids.shape[-2]} as in centroids; got {clusters}"
            )
        clusters, start = centroids.shape[-2], 0
        centroids = centroids.to(x.device, accumulator(x.dtype))
        centroids = centroids.reshape(problems.numel(), *centroids.shape[-2:]).contiguous()
    elif clusters is None:
        raise ValueError("clusters: expected a number, or centroids to start from; got neither")
    elif init not in _STARTS[1:]:
        raise ValueError(f"init: expected one of {', '.join(_STARTS[1:])}; got {init!r}")
    else:
        start = _STARTS.index(init)
    found = operators.kmeans(rows, centroids, clusters, iterations, start, fill_empty, seed)
    return KMeans(*(part.reshape(*problems, *part.shape[1:]) for part in found))
