# SPDX-License-Identifier: MIT
"""The head groups of a layer: their learned tensors besides projections, and their attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import centroids as _centroids
from .functional import GroupCall, GroupResult, Options, Rows, named_saved, run_group
from .library import group_seed
from .positions import rotated, widened_keys, widened_queries
from .spec import Group, head_groups
from .state import State, group_state


class _Relative(nn.Module):
    """The relative term of the logits, (weight q + bias) . r."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        drawn = torch.empty(head_dim, head_dim).uniform_(-1, 1) / math.sqrt(head_dim)
        self.weight = nn.Parameter(drawn)
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))


def _recomputing() -> bool:
    """Whether a backward pass repeats this forward pass (activation checkpointing)."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class HeadGroup(nn.Module):
    """The heads of a layer that share a mechanism, with their learned tensors."""

    centroids: Tensor  # routing
    counts: Tensor
    sums: Tensor

    def __init__(self, group: Group, dim: int, head_dim: int, seed: int) -> None:
        super().__init__()
        self.group = group
        self.commitment: Tensor | None = None
        self.commitment_differentiable = True
        self._tokens: list[tuple[Tensor, Tensor, Tensor | None]] = []  # tuples for torch.compile
        self._statistics: list[tuple[Tensor, Tensor]] = []
        state = group_state(group, head_dim, seed)
        if state.centroids is not None and state.logit_scale is not None:
            self.register_buffer("centroids", state.centroids)
            self.register_buffer("counts", state.counts)
            self.register_buffer("sums", state.sums)
            self.logit_scale = nn.Parameter(state.logit_scale)
        elif state.surrogates is not None:
            self.surrogates = nn.Parameter(state.surrogates)
            self.gate = nn.Linear(dim, 1)
        if group.positions == "relative":
            self.relative = _Relative(group.heads, head_dim)

    def placed(self, rows: Rows, base: float) -> Rows:
        """Rows (B, h, N, D) with their positions, from rows (B, N, h, D)."""
        q, v = rows.q.transpose(1, 2), rows.v.transpose(1, 2)
        k = None if rows.k is None else rows.k.transpose(1, 2)
        if self.group.positions == "rotary":
            q, k = rotated(q, base), None if k is None else rotated(k, base)
        elif self.group.positions == "relative" and k is not None:
            weight, bias = self.relative.weight, self.relative.bias
            q, k = widened_queries(q, weight, bias, base), widened_keys(k, weight.shape[0], base)
        return Rows(q, k, v)

    def state(self, x: Tensor | None = None) -> State | None:
        """Tensors of the mechanism besides rows; ``x`` (B, N, E), the layer's input, for cast."""
        if self.group.name == "routing":
            return State(*self.buffers_of_centroids(), self.logit_scale)
        if self.group.name == "cast":
            return State(surrogates=self.surrogates, gate=self.gate(x).squeeze(-1))
        return None

    def forward(self, rows: Rows, options: Options, x: Tensor | None = None) -> Tensor:
        """Attention (B, h, N, D) of placed rows."""
        call = GroupCall(self.group, *rows, self.state(x), options)
        moves = self.group.name == "routing" and self.training
        result = run_group(call, want_saved=moves)
        if moves:
            self._remember(call, result)
        return result.out

    def _remember(self, call: GroupCall, result: GroupResult) -> None:
        """Keeps what update_centroids, initialise_centroids and commitment_loss need of a pass."""
        saved = named_saved(call, result)

        def tokens(name: str, x: Tensor, lengths: Tensor | None) -> _centroids.Tokens:
            labels = saved.get(name)  # the strict form saves them
            if labels is None:
                labels = _centroids.nearest(x, self.centroids, lengths)
            return _centroids.Tokens(x, labels, lengths)

        parts = [tokens("q_labels", call.q, call.options.q_lengths)]
        if call.k is not None:
            parts.append(tokens("k_labels", call.k, call.options.k_lengths))
        losses = [_centroids.commitment(part, self.centroids) for part in parts]
        if _recomputing():
            return
        self.commitment = (losses[0] + losses[-1]) * self.group.number("commitment")
        self.commitment_differentiable = torch.is_grad_enabled()
        parts = [part._replace(x=part.x.detach()) for part in parts]
        none = _centroids.no_statistics(self.buffers_of_centroids())
        before = [_centroids.Statistics(*own) for own in self._statistics] or [none] * len(parts)
        found = [_centroids.add_statistics(*pair) for pair in zip(before, parts, strict=True)]
        self._statistics = [(members, sums) for members, sums in found]
        self._tokens = [(x, labels, lengths) for x, labels, lengths in parts]

    def buffers_of_centroids(self) -> _centroids.Centroids:
        """The buffers that update_centroids moves; routing only."""
        return _centroids.Centroids(self.centroids, self.counts, self.sums)

    def take_tokens(self) -> list[_centroids.Tokens]:
        """Returns and clears the queries and keys of the last training pass; clears statistics."""
        tokens, self._tokens, self._statistics = self._tokens, [], []
        return [_centroids.Tokens(*parts) for parts in tokens]

    def take_statistics(self) -> list[_centroids.Statistics | None]:
        """Returns and clears the statistics since the last call: queries, and keys if separate."""
        found, self._tokens, self._statistics = self._statistics, [], []
        if not found:
            return [None] if self.group.keys_are_queries else [None, None]
        return [_centroids.Statistics(*parts) for parts in found]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the tensors of the last pass out of copies."""
        return {**self.__dict__, "commitment": None, "_tokens": [], "_statistics": []}

    def extra_repr(self) -> str:
        return self.group.text


class HeadGroups(nn.Module):
    """The groups of a spec as submodules group_0, group_1, ...; no projections."""

    def __init__(
        self,
        spec: str,
        num_heads: int,
        head_dim: int,
        kv_heads: int,
        dim: int,
        causal: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.spec, self.causal = spec, causal
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        groups = head_groups(spec, num_heads, causal, kv_heads)
        self.num_groups = len(groups)
        for number, group in enumerate(groups):
            if group.positions != "none" and head_dim % 2:
                raise ValueError(f"head_dim: expected an even number for positions; got {head_dim}")
            own = group_seed(seed, 0, number)
            setattr(self, f"group_{number}", HeadGroup(group, dim, head_dim, own))

    def groups(self) -> list[HeadGroup]:
        """The groups in the order of their heads."""
        return [getattr(self, f"group_{number}") for number in range(self.num_groups)]
