# SPDX-License-Identifier: MIT
"""Recommended attention by sequence length, from measured speeds."""

from __future__ import annotations

from typing import NamedTuple

from .crossovers import MEASURED

_LARGEST_CUDA_HEAD = 128


class Recommendation(NamedTuple):
    """A spec ("full" if none was measured to be faster), and the reason."""

    spec: str
    reason: str


class Measured(NamedTuple):
    """The fastest spec at a length; ``speed`` times as fast as full attention."""

    device: str
    causal: bool
    near: bool  # keys near the query are exact
    tokens: int
    spec: str
    speed: float
    where: str


def _beginning(measured: list[Measured]) -> int | None:
    """The shortest length from which on no measured spec is slower than full attention."""
    begin = None
    for point in sorted(measured, key=lambda point: point.tokens, reverse=True):
        if point.speed < 1:
            break
        begin = point.tokens
    return begin


def recommend(
    n: int,
    *,
    causal: bool = False,
    device: str = "cpu",
    head_dim: int = 64,
    positions: bool = False,
) -> Recommendation:
    """The attention to start with for sequences of ``n`` tokens.

    This is the fastest spec at the longest measured length up to ``n``; ``"full"`` below the
    shortest length at which a spec was measured to be faster, and if there is no kernel. The error
    depends on the data: :func:`coterie.error` measures it. Causal models must be trained with the
    recommended spec.

    Args:
        n: sequence length.
        causal: positions attend to no later ones.
        device: ``"cpu"`` or ``"cuda"``.
        head_dim: head dimension; measurements used 64.
        positions: q and k contain positions (rotary or relative). Such heads attend to places near
            the query, so only specs with ``near`` of 32 or more are recommended.
    """
    if n < 1:
        raise ValueError(f"n: expected at least 1 token; got {n}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "cpu" or "cuda"; got {device!r}')
    if device == "cuda" and head_dim > _LARGEST_CUDA_HEAD:
        return Recommendation("full", f"CUDA kernels take head_dim up to {_LARGEST_CUDA_HEAD}")
    measured = [Measured(*row) for row in MEASURED if row[:3] == (device, causal, positions)]
    begin = _beginning(measured)
    if begin is None:
        which = "spec with near keys" if positions else "spec"
        kind = "causal " if causal else ""
        return Recommendation("full", f"no {kind}{which} was measured to be faster on {device}")
    if n < begin:
        return Recommendation("full", f"the shortest length with a measured gain is {begin}")
    best = max((m for m in measured if m.tokens <= n), key=lambda m: m.tokens)
    reason = f"{best.speed:.1f} times as fast at {best.tokens} tokens ({best.where})"
    return Recommendation(best.spec, reason)
