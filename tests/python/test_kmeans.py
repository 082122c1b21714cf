# SPDX-License-Identifier: MIT
"""coterie.kmeans against torch, and its errors."""

from __future__ import annotations

import coterie
import pytest
import torch


def test_finds_separated_groups() -> None:
    torch.manual_seed(1)
    centres = 20 * torch.randn(3, 5, 8)
    group = torch.randint(0, 5, (3, 400))
    x = torch.stack([c[g] for c, g in zip(centres, group, strict=True)]) + torch.randn(3, 400, 8)
    found = coterie.kmeans(x, 5, init="k-means++", seed=3)
    assert found.counts.sum(1).tolist() == [400] * 3
    distance = torch.cdist(x, found.centroids)
    assert torch.equal(distance.argmin(2).int(), found.labels)
    for p in range(3):
        for c in range(5):
            members = x[p][found.labels[p] == c]
            torch.testing.assert_close(members.mean(0), found.centroids[p, c], atol=1e-4, rtol=0)


def test_leading_sizes_and_warm_start() -> None:
    x = torch.randn(2, 3, 50, 4, dtype=torch.bfloat16)
    cold = coterie.kmeans(x, 6, iterations=3)
    assert cold.centroids.shape == (2, 3, 6, 4) and cold.centroids.dtype == torch.float32
    assert cold.labels.shape == (2, 3, 50) and cold.counts.shape == (2, 3, 6)
    start = coterie.kmeans(x, 6, iterations=1).centroids
    warm = coterie.kmeans(x, iterations=2, centroids=start)
    assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True))


def test_fills_empty_clusters_and_ignores_rows_that_are_not_finite() -> None:
    x = torch.zeros(1, 40, 3)
    x[0, ::2] = torch.randn(20, 3)
    x[0, 5] = float("nan")
    found = coterie.kmeans(x, 25, fill_empty=True)
    assert found.counts.min() == 1 and found.counts.sum() == 39
    assert found.labels[0, 5] == -1
    assert coterie.kmeans(torch.zeros(2, 0, 3), 4).centroids.abs().sum() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clusters": 3, "init": "far"}, "init: expected one of random, k-means"),
        ({}, "clusters: expected a number"),
        ({"centroids": torch.zeros(1, 3, 5)}, "centroids: expected"),
        ({"clusters": 4, "centroids": torch.zeros(1, 3, 2)}, "clusters: expected 3"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coterie.kmeans(torch.zeros(1, 9, 2), **arguments)


def test_compiles() -> None:
    x = torch.randn(2, 60, 8)
    arguments = (x, None, 4, 2, 1, True, 5)
    torch.library.opcheck(torch.ops.coterie.kmeans.default, arguments)
    compiled = torch.compile(lambda rows: coterie.kmeans(rows, 4, 2).labels, fullgraph=True)
    assert torch.equal(compiled(x), coterie.kmeans(x, 4, 2).labels)
