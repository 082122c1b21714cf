# SPDX-License-Identifier: MIT
"""Full attention for a sample of rows, over the logits that a mechanism works with."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .functional import GroupCall, Options
from .layout import accumulator
from .state import normalised_rows


class Sample(NamedTuple):
    """Rows of each batch entry, and what each of them may look at."""

    rows_BR: Tensor  # counted from the start of the batch entry
    allowed: Tensor  # bool (B, 1 or h, R, S)
    key_valid_BS: Tensor
    scale: float
    packed: bool

    def index_BHR(self, heads: int) -> Tensor:
        """The rows as an index for gather."""
        return self.rows_BR[:, None, :].expand(-1, heads, -1)


class ExactRows(NamedTuple):
    """Full attention's output (B, h, R, Dv), weights (B, h, R, S) and log-sum-exp (B, h, R)."""

    out: Tensor
    weights: Tensor
    lse: Tensor


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
    return 1.0 if call.group.name == "routing" else 1 / math.sqrt(call.q.shape[-1])


def sample_rows(call: GroupCall, options: Options, rows: int) -> Sample:
    """``rows`` rows, evenly spread over the valid ones of each batch entry."""
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
    allowed = allowed[:, None]
    if options.mask is not None:
        index = rows_BR[:, None, :, None].expand(
            -1, options.mask.shape[1], -1, options.mask.shape[3]
        )
        allowed = allowed & torch.gather(options.mask, 2, index)
    return Sample(rows_BR, allowed, k.valid(), _scale(call, options), packed)


def exact_rows(call: GroupCall, sample: Sample) -> ExactRows:
    """Full attention of the sampled rows; rows that may look at nothing are 0."""
    wide = accumulator(call.q.dtype)
    q = call.q.to(wide)
    k = q if call.k is None else call.k.to(wide)
    if call.group.name == "routing":
        q, k = normalised_rows(q), normalised_rows(k)
    heads = q.shape[1]
    q = torch.gather(q, 2, sample.index_BHR(heads)[..., None].expand(-1, -1, -1, q.shape[-1]))
    if call.state is not None and call.state.logit_scale is not None:
        q = q * call.state.logit_scale.to(wide)[:, None, None]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, call.v.to(wide)))
    logits = (q @ k.mT * sample.scale).masked_fill(~sample.allowed, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return ExactRows(weights @ v, weights, lse)
