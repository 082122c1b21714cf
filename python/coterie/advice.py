# SPDX-License-Identifier: MIT
"""Which attention for which length, from measured crossovers."""

from __future__ import annotations

from typing import NamedTuple


class Recommendation(NamedTuple):
    """A spec ("full" where nothing else pays), and why."""

    spec: str
    reason: str


class _Crossover(NamedTuple):
    length: int  # the shortest one measured at which the mechanism beats torch's full attention
    where: str


# Forward and backward. CUDA: by python/bench/compare.py. CPU: rough, from one loaded machine with n / 32
# clusters; measure your own shapes before relying on them.
_CROSSOVERS = {
    ("cpu", False): _Crossover(256, "float32, head_dim 64, one thread"),
    ("cpu", True): _Crossover(512, "float32, head_dim 64, one thread"),
    ("cuda", False): _Crossover(8192, "bfloat16, head_dim 64, 16 heads on one H200"),
}
_LARGEST_CUDA_HEAD = 128
_TOPK = 32


def _clusters(n: int) -> int:
    return min(256, max(16, n // 32))


def recommend(
    n: int, *, causal: bool = False, device: str = "cpu", head_dim: int = 64
) -> Recommendation:
    """The attention to begin with for sequences of ``n`` tokens.

    Below the measured crossover, and where there is no kernel, that is ``"full"``. The error
    depends on the data: :func:`coterie.error` measures it.

    Args:
        n: tokens of a sequence.
        causal: no position may look at later ones.
        device: ``"cpu"`` or ``"cuda"``.
        head_dim: elements of a query.
    """
    if n < 1:
        raise ValueError(f"n: expected at least 1 token; got {n}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "cpu" or "cuda"; got {device!r}')
    crossover = _CROSSOVERS.get((device, causal))
    if crossover is None or (device == "cuda" and head_dim > _LARGEST_CUDA_HEAD):
        return Recommendation("full", f"there is no kernel for this on {device}")
    measured = f"{crossover.length} tokens ({crossover.where})"
    if n < crossover.length:
        return Recommendation("full", f"{n} tokens are below the measured crossover, {measured}")
    if causal:
        spec = f"routing(clusters={_clusters(n) // 4},window={max(64, n // 16)})"
        return Recommendation(spec, f"the model must be trained with it; it pays from {measured}")
    spec = f"i-clustered(clusters={_clusters(n)},topk={_TOPK})"
    return Recommendation(spec, f"it pays from {measured}")
