# SPDX-License-Identifier: MIT
"""Quality of a mechanism: clusters, kept attention mass, error and error bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .exact import Sample, exact_rows, sample_rows
from .functional import (
    CallOptions,
    GroupCall,
    GroupResult,
    Options,
    make_options,
    options_of,
    prepare,
    run_groups,
)
from .layout import saved_layout, sizes_of
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
    of it for every row, rounding included, from the distance of a query to its centroid
    (clustered, i-clustered) or from the kept mass (full, local, strided, oracle-top, strict
    routing), else None. The logits are the mechanism's: of normalised rows for routing, of unit
    keys for lsh; a query's own key is left out if the mechanism demotes it and there is another.
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
        calls = prepare(q, k, v, spec, state, options.get("causal", False))
        settled = make_options(q, v, **options)
        return collect_stats(calls, run_groups(calls, settled, True), settled, rows)


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
    with torch.no_grad():
        calls = prepare(q, k, v, spec, state, options.get("causal", False))
        settled = make_options(q, v, **options)
        return [
            _error_of(call, result, options_of(settled, call.group), rows)
            for call, result in zip(calls, run_groups(calls, settled, True), strict=True)
        ]


def collect_stats(
    calls: Sequence[GroupCall], results: Sequence[GroupResult], options: Options, rows: int = 256
) -> list[Stats]:
    """The statistics of a finished forward pass."""
    found = []
    with torch.no_grad():
        for call, result in zip(calls, results, strict=True):
            own = options_of(options, call.group)
            saved = named_saved(call, result, own)
            sizes = _cluster_sizes(saved)
            empty = None if sizes is None else (sizes == 0).sum(-1)
            mass = _kept_mass(call, saved, sample_rows(call, own, rows))
            found.append(
                Stats(call.group.text, sizes, empty, None if mass is None else _row_mean(mass))
            )
    return found


def named_saved(call: GroupCall, result: GroupResult, options: Options) -> dict[str, Tensor]:
    """The saved tensors of a pass by name."""
    sizes = sizes_of(call.group, call.q, call.v, options.cu_seqlens_q)
    names = [saved.name for saved in saved_layout(call.group, sizes, call.q.is_cuda)]
    return dict(zip(names, result.saved, strict=True))


def _cluster_sizes(saved: dict[str, Tensor]) -> Tensor | None:
    offsets = saved.get("offsets", saved.get("q_offsets"))
    if offsets is not None:
        return offsets.diff(dim=-1)
    members = saved.get("q_members", saved.get("members"))
    return None if members is None else (members >= 0).sum(-1)


def _row_mean(values: Tensor) -> Tensor:
    """Mean (h) over batch and rows of (B, h, R), without rows that have no keys."""
    return torch.nanmean(values.transpose(0, 1).flatten(1), 1)


def _kept_mass(call: GroupCall, saved: dict[str, Tensor], sample: Sample) -> Tensor | None:
    """Share of full attention's weight on the keys of each row; NaN for rows without keys."""
    exact = exact_rows(call, sample)
    full = exact.lse
    if call.group.takes_mask or "top_keys" in saved or "q_offsets" in saved:
        kept = _kept_lse(call, saved, sample).to(full.dtype)
        mass = (kept - full).exp()
        if sample.demoted is not None:
            # A query without other selected keys attends to its own, which has no weight in full.
            own = exact.logits.masked_fill(~sample.demoted, -torch.inf).amax(-1)
            mass = mass.masked_fill((kept - own).abs() <= exact.rounding, 0.0)
    else:
        queries = saved.get("q_members", saved.get("members"))
        if queries is None or sample.packed:
            return None
        keys = saved.get("k_members", queries)
        mass = _member_mass(call, queries, keys, sample)
    return torch.where(full.isfinite(), mass, torch.nan)


def _kept_lse(call: GroupCall, saved: dict[str, Tensor], sample: Sample) -> Tensor:
    return torch.gather(saved["lse"], 2, sample.index_BHR(call.q.shape[1]))


def _member_mass(call: GroupCall, queries: Tensor, keys: Tensor, sample: Sample) -> Tensor:
    """The weight on keys that are in a cluster of the row, for lists (B, h, C, .) of members."""
    heads = call.q.shape[1]
    weights = exact_rows(call, sample).weights
    inside = (queries.unsqueeze(2) == sample.rows_BR[:, None, :, None, None]).any(-1)  # B h R C
    listed = torch.zeros(*keys.shape[:3], weights.shape[-1] + 1, device=keys.device)
    listed.scatter_(3, keys.long().where(keys >= 0, weights.shape[-1]), 1.0)
    listed = listed[..., :-1].repeat_interleave(heads // listed.shape[1], 1)  # B H C S
    seen = inside.float().expand(-1, heads, -1, -1) @ listed
    return (weights * (seen > 0)).sum(-1)


def _error_of(call: GroupCall, result: GroupResult, options: Options, rows: int) -> ErrorReport:
    sample = sample_rows(call, options, rows)
    exact = exact_rows(call, sample)
    index = sample.index_BHR(call.q.shape[1]).unsqueeze(-1)
    out = torch.gather(result.out, 2, index.expand(-1, -1, -1, result.out.shape[-1]))
    difference = out.to(exact.out.dtype) - exact.out
    norms = [torch.linalg.vector_norm(x, dim=(0, 2, 3)) for x in (difference, exact.out)]
    saved = named_saved(call, result, options)
    return ErrorReport(
        call.group.text,
        norms[0] / norms[1],
        torch.linalg.vector_norm(difference, dim=-1),
        _row_bound(call, saved, sample),
    )


def _row_bound(call: GroupCall, saved: dict[str, Tensor], sample: Sample) -> Tensor | None:
    exact = exact_rows(call, sample)
    values = call.v.to(exact.out.dtype)
    radius, largest = (_radius(values, sample, call.q.shape[1], c) for c in (True, False))
    if "centroids" in saved:
        if sample.packed:
            return None
        bound = _centroid_distance(call, saved, sample) * radius
    else:
        mass = _kept_mass(call, saved, sample)
        if mass is None or not (call.group.takes_mask or "q_offsets" in saved):
            return None
        # Weights w on the kept keys become w / mass: their L1 distance from w is 2 (1 - mass).
        bound = 2 * (1 - mass.nan_to_num(1.0)).clamp_min(0) * radius
        # A row without kept keys is 0, which is only exact if it has none in full attention either.
        empty = _kept_lse(call, saved, sample).isneginf() & exact.lse.isfinite()
        bound = torch.where(empty, largest, bound)
    # Weights, parts of an output and the output itself may be rounded to the type of the inputs.
    stored = 0.0 if call.q.dtype == exact.out.dtype else 4 * torch.finfo(call.q.dtype).eps
    return bound + (exact.rounding + stored) * largest


def _centroid_distance(call: GroupCall, saved: dict[str, Tensor], sample: Sample) -> Tensor:
    """Bounds the L1 distance of the weights of each query from those of its centroid.

    Up to a constant their logits differ by at most r = |scale| |q - centroid| max |key - mean key|,
    so the L1 distance is at most 2 tanh(r / 2), and less for i-clustered.
    """
    heads = call.q.shape[1]
    index = sample.index_BHR(heads)
    labels = torch.gather(saved["labels"], 2, index).long().clamp_min(0)
    wide = saved["centroids"].dtype
    q = torch.gather(call.q, 2, index.unsqueeze(-1).expand(-1, -1, -1, call.q.shape[-1])).to(wide)
    centroids = torch.gather(
        saved["centroids"], 2, labels.unsqueeze(-1).expand(-1, -1, -1, q.shape[-1])
    )
    distance = torch.linalg.vector_norm(q - centroids, dim=-1)
    keys = call.q if call.k is None else call.k
    r = abs(sample.scale) * distance * _radius(keys.to(wide), sample, heads)
    return 2 * torch.tanh(r / 2)


def _radius(x: Tensor, sample: Sample, heads: int, centred: bool = True) -> Tensor:
    """Largest distance of a valid row from the mean of the valid rows, or from 0, (B, heads, 1)."""
    valid = sample.key_valid_BS[:, None, :, None]
    count = valid.sum(2, keepdim=True).clamp_min(1)
    mean = torch.where(valid, x, 0).sum(2, keepdim=True) / count * centred
    distance: Tensor = torch.linalg.vector_norm(torch.where(valid, x - mean, 0), dim=-1)
    return distance.amax(-1, keepdim=True).repeat_interleave(heads // x.shape[1], 1)
