# SPDX-License-Identifier: MIT
"""Full attention for a sample of rows, with the logits of a mechanism."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .functional import GroupCall, Options
from .layout import accumulator


class Sample(NamedTuple):
    """Sampled rows of each batch entry, and the keys that each may attend to."""

    rows_BR: Tensor  # counted from the start of the batch entry
    allowed: Tensor  # bool (B, 1 or h, R, S)
    demoted: Tensor | None  # own keys, left out because there are others, (B, 1, R, S)
    key_valid_BS: Tensor
    scale: float
    packed: bool

    def index_BHR(self, heads: int) -> Tensor:
        """The rows as an index for gather."""
        return self.rows_BR[:, None, :].expand(-1, heads, -1)


class ExactRows(NamedTuple):
    """Full attention's output (B, h, R, Dv), weights (B, h, R, S) and log-sum-exp (B, h, R).

    ``logits`` (B, h, R, S) are those of all keys. ``rounding`` (B, h, R): estimated L1 distance of
    a row's weights here from those of a mechanism, due to rounding in both.
    """

    out: Tensor
    weights: Tensor
    lse: Tensor
    logits: Tensor
    rounding: Tensor


class _Places(NamedTuple):
    """For each row of a tensor: its item, its position there, the item's length."""

    item: Tensor
    position: Tensor
    length: Tensor

    def valid(self) -> Tensor:
        return self.position < self.length


def _places(x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> _Places:
    B, rows = x.shape[0], x.shape[2]
    position = torch.arange(rows, device=x.device).expand(B, rows)
    if cu_seqlens is None:
        item = torch.arange(B, device=x.device)[:, None].expand(B, rows)
        full = position.new_full((B,), rows) if lengths is None else lengths.long()
        return _Places(item, position, full[:, None].expand(B, rows))
    starts = cu_seqlens.long()
    item = torch.searchsorted(starts, position, right=True) - 1
    last = item.clamp(0, starts.numel() - 2)  # rows after the last item have no length
    length = torch.where(item < starts.numel() - 1, starts[last + 1] - starts[last], 0)
    return _Places(item, position - starts[last], length)


def _scale(call: GroupCall, options: Options) -> float:
    if options.scale:
        return options.scale
    return 1.0 if call.group.rows == "normalised" else 1 / math.sqrt(call.q.shape[-1])


def sample_rows(call: GroupCall, options: Options, rows: int) -> Sample:
    """``rows`` rows, evenly spaced among the valid ones of each batch entry."""
    if rows < 1:
        raise ValueError(f"rows: expected at least 1; got {rows}")
    q = _places(call.q, options.q_lengths, options.cu_seqlens_q)
    k = _places(call.v, options.k_lengths, options.cu_seqlens_k)
    count = min(rows, call.q.shape[2])
    packed = options.cu_seqlens_q is not None
    last = q.position[:, -1:] * 0 + call.q.shape[2] - 1 if packed else q.length[:, :1] - 1
    steps = torch.linspace(0, 1, count, device=call.q.device, dtype=torch.float64)
    rows_BR = (steps * last.clamp_min(0)).round().long()
    item, position, length = (torch.gather(part, 1, rows_BR)[:, :, None] for part in q)
    allowed = (item == k.item[:, None, :]) & (position < length) & k.valid()[:, None, :]
    if call.group.causality != "none":
        allowed &= k.position[:, None, :] <= position + k.length[:, None, :] - length
    allowed, demoted = allowed[:, None], None
    if _demotes(call):
        own = k.position[:, None, :] == position + k.length[:, None, :] - length
        others = allowed & ~own[:, None]
        met = others.any(-1, keepdim=True)
        allowed, demoted = torch.where(met, others, allowed), allowed & met & ~others
    if options.mask is not None:
        index = rows_BR[:, None, :, None].expand(
            -1, options.mask.shape[1], -1, options.mask.shape[3]
        )
        allowed = allowed & torch.gather(options.mask, 2, index)
    return Sample(rows_BR, allowed, demoted, k.valid(), _scale(call, options), packed)


def _demotes(call: GroupCall) -> bool:
    """Whether a query attends to its own key only if there is no other."""
    parameters = call.group.parameters
    return parameters.get("self") == "demote" or parameters.get("combine") == "lse"


def _logit_rows(call: GroupCall, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
    """Rows whose products are the logits, and the norms of the terms they are computed from."""
    size = torch.linalg.vector_norm(x, dim=-1)
    if call.group.rows == "normalised":
        rows: Tensor = torch.ops.coterie.normalise_rows(x)
        return rows, size * (x.var(-1, correction=0) + 1e-6).rsqrt()
    if call.group.rows == "unit_keys" and keys:  # zero rows stay zero
        unit = x / size.masked_fill(size == 0, 1).unsqueeze(-1)
        return unit, torch.ones_like(size)
    return x, size


def unit_roundoff(x: Tensor) -> float:
    """Unit roundoff of products and sums for inputs like x; GPUs split f32 into tf32 parts."""
    wide = accumulator(x.dtype)
    return 2.0**-20 if x.is_cuda and wide == torch.float32 else torch.finfo(wide).eps / 2


def exact_rows(call: GroupCall, sample: Sample) -> ExactRows:
    """Full attention of the sampled rows; rows without allowed keys are 0."""
    wide = accumulator(call.q.dtype)
    heads, index = call.q.shape[1], sample.index_BHR(call.q.shape[1])
    keys = call.q if call.k is None else call.k
    q, q_size = _logit_rows(call, call.q.to(wide), keys=False)
    k, k_size = _logit_rows(call, keys.to(wide), keys=True)
    q = torch.gather(q, 2, index[..., None].expand(-1, -1, -1, q.shape[-1]))
    scale = q.new_full((heads, 1, 1), sample.scale)
    if call.state is not None and call.state.logit_scale is not None:
        scale = scale * call.state.logit_scale.to(wide)[:, None, None]
    grouped = (k, call.v.to(wide), k_size)
    k, v, k_size = (x.repeat_interleave(heads // x.shape[1], 1) for x in grouped)
    logits = q @ k.mT * scale
    masked = logits.masked_fill(~sample.allowed, -torch.inf)
    lse = masked.logsumexp(-1)
    weights = (masked - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    longest = k_size.masked_fill(~sample.key_valid_BS[:, None], 0).amax(-1, keepdim=True)
    # Rounding errors of a sum of n terms are independent and grow as sqrt(n), in logits of this
    # size and in sums over keys. Both are rounded here, in the mechanism and in its log-sum-exp.
    size = scale.abs().squeeze(-1) * torch.gather(q_size, 2, index) * longest
    terms = math.sqrt(q.shape[-1] + 4) * size + math.sqrt(v.shape[2] + 4)
    return ExactRows(weights @ v, weights, lse, logits, 12 * unit_roundoff(call.q) * terms)
