# SPDX-License-Identifier: MIT
"""Quality of a mechanism: clusters, kept attention mass, error and error bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .functional import (
    CallOptions,
    GroupCall,
    GroupResult,
    Options,
    arguments_of,
    named_saved,
    run_spec,
)
from .layout import accumulator
from .library import operators
from .state import State


class Stats(NamedTuple):
    """Clusters of one head group.

    ``sizes`` (items, h, C): tokens in each cluster, None without clusters; ``empty`` (items, h):
    clusters without tokens; ``kept_mass`` (h): the share of full attention's weight on keys that
    the mechanism attends to individually, averaged over the sampled rows; None if it attends to no
    individual keys (clustered) or to the same key several times (lsh).
    """

    spec: str
    sizes: Tensor | None
    empty: Tensor | None
    kept_mass: Tensor | None


class ErrorReport(NamedTuple):
    """Difference from full attention over the same logits, on a sample of rows of one head group.

    ``relative`` (h): norm of the difference over the norm of full attention's output;
    ``row_error`` (B, h, R): norm of each row's difference; ``row_bound`` (B, h, R): an upper bound
    of it for every row, rounding included, from the distance of the weights to those of full
    attention (clustered, i-clustered) or from the kept mass (full, local, strided, oracle-top,
    strict routing), else None. The logits are the mechanism's: of normalised rows for routing, of
    unit keys for lsh; a query's own key is left out if the mechanism demotes it and there is
    another.
    """

    spec: str
    relative: Tensor
    row_error: Tensor
    row_bound: Tensor | None


def stats(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    spec: str,
    *,
    state: State | Sequence[State] | None = None,
    rows: int = 256,
    **options: Unpack[CallOptions],
) -> list[Stats]:
    """Cluster sizes, empty clusters and kept attention mass of each head group.

    Arguments as for :func:`coterie.attention`; the kept mass is averaged over ``rows`` evenly
    spaced rows of each batch entry.
    """
    with torch.no_grad():
        return collect_stats(*run_spec(q, k, v, spec, state, Options(**options), True), rows)


def error(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    spec: str,
    *,
    state: State | Sequence[State] | None = None,
    rows: int = 256,
    **options: Unpack[CallOptions],
) -> list[ErrorReport]:
    """Error of each head group against full attention on a sample of rows, with bounds.

    Arguments as for :func:`coterie.attention`; samples ``rows`` evenly spaced rows per batch entry.
    """
    reports = []
    with torch.no_grad():
        finished = run_spec(q, k, v, spec, state, Options(**options), True)
        for call, result in zip(*finished, strict=True):
            found = _quality(call, result, rows)
            relative = found.error.norm(dim=(0, 2)) / found.norm.norm(dim=(0, 2))
            reports.append(ErrorReport(call.group.text, relative, found.error, found.bound))
    return reports


def collect_stats(
    calls: Sequence[GroupCall], results: Sequence[GroupResult], rows: int = 256
) -> list[Stats]:
    """The statistics of a finished forward pass."""
    found = []
    with torch.no_grad():
        for call, result in zip(calls, results, strict=True):
            sizes = _cluster_sizes(named_saved(call, result))
            empty = None if sizes is None else (sizes == 0).sum(-1)
            mass = _quality(call, result, rows).mass
            mean = None if mass is None else mass.transpose(0, 1).flatten(1).nanmean(1)
            found.append(Stats(call.group.text, sizes, empty, mean))
    return found


class _Quality(NamedTuple):
    """Values (B, h, R) of sampled rows, None where the mechanism has none; see the core's header
    quality.h."""

    error: Tensor
    norm: Tensor
    mass: Tensor | None
    bound: Tensor | None


def _quality(call: GroupCall, result: GroupResult, rows: int) -> _Quality:
    if rows < 1:
        raise ValueError(f"rows: expected at least 1; got {rows}")
    inputs, rest = arguments_of(call)
    given = (x.cpu() if isinstance(x, Tensor) else x for x in (*inputs, *rest, result.out))
    saved = [x.cpu() for x in result.saved]
    found = operators.attention_quality(*given, saved, rows, call.q.is_cuda)
    wide = accumulator(call.q.dtype)
    error, norm, *others = (x.to(call.q.device, wide) for x in found)
    return _Quality(error, norm, *(x if x.dim() == 3 else None for x in others))


def _cluster_sizes(saved: dict[str, Tensor]) -> Tensor | None:
    offsets = saved.get("offsets", saved.get("q_offsets"))
    if offsets is not None:
        return offsets.diff(dim=-1)
    members = saved.get("q_members", saved.get("members"))
    return None if members is None else (members >= 0).sum(-1)
