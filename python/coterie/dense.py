# SPDX-License-Identifier: MIT
"""Attention with terms that the kernels lack: biases of the logits, soft caps, sinks.

In plain torch and with all logits in memory, as transformers' eager attention; for the mechanisms
that attend to individual keys: full, local, oracle-top.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional import Options, Rows
from .layout import accumulator
from .spec import Group


class Terms(NamedTuple):
    """What changes the logits of a layer besides its rows, by the names of transformers.

    ``position_bias``, broadcast to (B, H, N, S), is added to them; ``softcap`` c makes them
    c tanh(x / c); ``s_aux`` (H) are sinks, the logits of one more key of each head, whose value
    is 0.
    """

    position_bias: Tensor | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None

    def named(self) -> str:
        """The names of the given terms."""
        return ", ".join(n for n, term in zip(self._fields, self, strict=True) if term is not None)

    def of(self, group: Group) -> Terms:
        """Those of a group's heads."""
        bias, sinks = self.position_bias, self.s_aux
        if bias is not None and bias.shape[-3] > 1:
            bias = bias.narrow(-3, group.first, group.heads)
        if sinks is not None:
            sinks = sinks.flatten().narrow(0, group.first, group.heads)
        return Terms(bias, self.softcap, sinks)


_DENSE = ("full", "local", "oracle-top")


def check_terms(group: Group, terms: Terms) -> None:
    """Refuses terms that a mechanism does not support."""
    sliding = group.name != "local" or group.parameters["kind"] == "sliding"
    if group.name not in _DENSE or not sliding:
        raise ValueError(
            f"{terms.named()}: {group.text} does not support terms of the logits besides q and k; "
            f"use one of {', '.join(_DENSE)} in this layer, or leave it out of layers="
        )


def dense_attention(
    group: Group,
    rows: Rows,
    options: Options,
    first: int | Tensor,
    terms: Terms,
) -> Tensor:
    """Attention (B, h, N, Dv) of a group.

    ``options`` has causal, scale, mask and dropout; ``first``: the first query's own place in the
    keys.
    """
    q, k, v = rows
    if k is None:
        raise ValueError(f"k: {group.text} needs keys; got None")
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scale = options.scale or q.shape[3] ** -0.5
    logits = torch.matmul(q, k.transpose(2, 3)).to(accumulator(q.dtype)) * scale
    if terms.softcap is not None:
        logits = torch.tanh(logits / terms.softcap) * terms.softcap
    if terms.position_bias is not None:
        logits = logits + terms.position_bias
    allowed = _allowed(group, q, k, options.causal, first)
    if options.mask is not None:
        allowed = options.mask if allowed is None else options.mask & allowed
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if group.name == "oracle-top":
        least = logits.topk(min(group.whole("topk"), k.shape[2]), -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    weights = _softmax(logits, terms.s_aux).to(v.dtype)
    return torch.matmul(F.dropout(weights, options.dropout), v)


def _allowed(
    group: Group, q: Tensor, k: Tensor, causal: bool, first: int | Tensor
) -> Tensor | None:
    if not causal and group.name != "local":
        return None
    own = torch.arange(q.shape[2], device=q.device)[:, None] + first
    ahead = torch.arange(k.shape[2], device=q.device) - own
    if group.name != "local":
        return ahead <= 0
    window = group.whole("window")
    if causal:
        return (ahead <= 0) & (ahead > -window)
    return (ahead >= -(window // 2)) & (ahead < (window + 1) // 2)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax whose rows are 0 where no key is allowed."""
    highest = logits.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(logits.dtype)[None, :, None, None]
        highest = torch.maximum(highest, sinks)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    weights = torch.exp(logits - highest)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - highest)
    return weights / total.masked_fill(total == 0, 1)
