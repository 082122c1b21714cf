# SPDX-License-Identifier: MIT
"""Which attention for which length, from measured speeds."""

from __future__ import annotations

from typing import NamedTuple

from .crossovers import MEASURED

_LARGEST_CUDA_HEAD = 128


class Recommendation(NamedTuple):
    """A spec ("full" where nothing else is known to pay), and why."""

    spec: str
    reason: str


class Measured(NamedTuple):
    """The fastest spec at a length; ``speed`` times as fast as full attention."""

    device: str
    causal: bool
    tokens: int
    spec: str
    speed: float
    where: str


def _beginning(measured: list[Measured]) -> int | None:
    """The shortest length from which on everything measured is faster than full attention."""
    begin = None
    for point in sorted(measured, key=lambda point: point.tokens, reverse=True):
        if point.speed < 1:
            break
        begin = point.tokens
    return begin


def recommend(
    n: int, *, causal: bool = False, device: str = "cpu", head_dim: int = 64
) -> Recommendation:
    """The attention to begin with for sequences of ``n`` tokens.

    What was the fastest at the longest measured length that is not above ``n``; ``"full"`` below
    the shortest length at which anything was measured to be faster, and where there is no kernel.
    The error depends on the data: :func:`coterie.error` measures it. Causal models must be trained
    with what is recommended.

    Args:
        n: tokens of a sequence.
        causal: no position may look at later ones.
        device: ``"cpu"`` or ``"cuda"``.
        head_dim: elements of a query; measured with 64.
    """
    if n < 1:
        raise ValueError(f"n: expected at least 1 token; got {n}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "cpu" or "cuda"; got {device!r}')
    if device == "cuda" and head_dim > _LARGEST_CUDA_HEAD:
        return Recommendation("full", f"CUDA kernels take heads up to {_LARGEST_CUDA_HEAD}")
    measured = [Measured(*row) for row in MEASURED if row[:2] == (device, causal)]
    begin = _beginning(measured)
    if begin is None:
        return Recommendation("full", f"nothing was measured to be faster on {device}")
    if n < begin:
        return Recommendation("full", f"{begin} tokens are the fewest with a gain measured")
    best = max((m for m in measured if m.tokens <= n), key=lambda m: m.tokens)
    reason = f"{best.speed:.1f} times as fast at {best.tokens} tokens ({best.where})"
    return Recommendation(best.spec, reason)
