# SPDX-License-Identifier: MIT
"""Time of a k-means iteration on a GPU, beside the package flash-kmeans where it is installed.

    python python/bench/kmeans.py
    python python/bench/kmeans.py --shapes 16x65536x64x256 --dtype float16

A shape is problems x rows x elements x clusters. Both start from the same centroids. An iteration
is the difference of calls with 22 and with 2 iterations, over 20; medians of five. `distance` is
the mean squared distance of a row to the centroid of its label after 22 iterations, in f32.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import coterie

Call = Callable[[int], tuple[Tensor, Tensor]]  # iterations -> labels and centroids
FEW, MANY, REPEATS = 2, 22, 5


def ours(x: Tensor, start: Tensor) -> Call:
    def call(iterations: int) -> tuple[Tensor, Tensor]:
        found = coterie.kmeans(x, iterations=iterations, centroids=start.float())
        return found.labels.long(), found.centroids

    return call


def flash_kmeans(x: Tensor, start: Tensor) -> Call:
    from flash_kmeans import batch_kmeans_Euclid

    def call(iterations: int) -> tuple[Tensor, Tensor]:
        labels, centroids, _ = batch_kmeans_Euclid(
            x, start.shape[1], max_iters=iterations, tol=-1.0, init_centroids=start
        )
        return labels.long(), centroids.float()

    return call


def milliseconds(call: Call, iterations: int) -> float:
    """Of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(iterations)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def iteration(call: Call) -> float:
    """Milliseconds of an iteration."""
    for iterations in (MANY, FEW):
        call(iterations)  # compiles, fills the pool of memory
    times = [milliseconds(call, MANY) - milliseconds(call, FEW) for _ in range(REPEATS)]
    return statistics.median(times) / (MANY - FEW)


def distance(x: Tensor, found: tuple[Tensor, Tensor]) -> float:
    """Mean squared distance of rows to the centroids of their labels."""
    sums = [
        (rows.float() - centroids[labels]).square().sum(1).mean().item()
        for rows, labels, centroids in zip(x, *found, strict=True)
    ]
    return statistics.mean(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["32x65536x128x1024", "16x65536x64x256"])
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", options.dtype)
    for shape in options.shapes:
        problems, rows, width, clusters = (int(size) for size in shape.split("x"))
        torch.manual_seed(1)
        x = torch.randn(problems, rows, width, device="cuda", dtype=getattr(torch, options.dtype))
        start = x[:, torch.randperm(rows, device="cuda")[:clusters]].contiguous()
        calls = {"coterie": ours(x, start)}
        if importlib.util.find_spec("flash_kmeans"):
            calls["flash-kmeans"] = flash_kmeans(x, start)
        for name, call in calls.items():
            time, squared = iteration(call), distance(x, call(MANY))
            print(f"{shape:20}  {name:14}  {time:7.3f} ms  distance {squared:.4f}", flush=True)


if __name__ == "__main__":
    main()
