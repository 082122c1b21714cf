# SPDX-License-Identifier: MIT
"""Attention by a spec, on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from . import ops
from .layout import accumulator
from .library import operators
from .spec import Group, head_groups
from .state import State


class CallOptions(TypedDict, total=False):
    """Keywords that the public functions share; :func:`coterie.attention` explains them."""

    causal: bool
    scale: float | None
    seed: int
    q_lengths: Tensor | None
    k_lengths: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    mask: Tensor | None
    part: tuple[int, int]
    selection: Sequence[Tensor]


class Options(NamedTuple):
    """Arguments of a call besides q, k, v, spec and state; as in :func:`attention`."""

    causal: bool = False
    scale: float | None = None
    seed: int = 0
    q_lengths: Tensor | None = None
    k_lengths: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    mask: Tensor | None = None  # bool (B, H, N, S)
    dropout: float = 0.0
    part: tuple[int, int] = (0, 1)  # number and count: of equal parts of a group's heads
    selection: Sequence[Tensor] = ()  # of select(), for one group; empty: chosen


class Rows(NamedTuple):
    """Queries, keys and values of heads; k None if the keys are the queries."""

    q: Tensor
    k: Tensor | None
    v: Tensor

    def of(self, group: Group, dim: int) -> Rows:
        """Those of a group; heads are in dimension ``dim``, k has those of groups with keys."""
        k = self.k
        if k is not None:
            k = k.narrow(dim, group.first_key, group.key_heads) if group.key_heads else None
        q = self.q.narrow(dim, group.first, group.heads)
        return Rows(q, k, self.v.narrow(dim, group.first_kv, group.kv_heads))


class GroupCall(NamedTuple):
    """The call of one head group: slices of the layer's tensors."""

    group: Group
    q: Tensor
    k: Tensor | None
    v: Tensor
    state: State | None
    options: Options


class GroupResult(NamedTuple):
    """out (B, h, N, Dv), and the saved tensors in the order of :mod:`coterie.layout`.

    ``saved`` may be empty unless requested.
    """

    out: Tensor
    saved: Sequence[Tensor]


_SEEDS = 2**63
_TENSORS = Options._fields[3:8]


def _converted(name: str, tensor: Tensor, q: Tensor, v: Tensor) -> Tensor:
    if name == "mask":
        return _bool_mask(tensor, q, v)
    if tensor.dtype == torch.int32:
        return tensor
    if tensor.dtype not in (torch.int64, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name}: expected integers; got {tensor.dtype}")
    return tensor.to(torch.int32)


def _bool_mask(mask: Tensor, q: Tensor, v: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected bool, True where a query may attend; got {mask.dtype}")
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], v.shape[2])


def _refuse_rows(q: Tensor, k: Tensor | None, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is not None and tensor.dim() != 4:
            raise ValueError(
                f"{name}: expected shape (batch, heads, tokens, head_dim); "
                f"got {tuple(tensor.shape)}"
            )


def check_dropout(name: str, p: float) -> None:
    """Refuses what is not a probability of dropout."""
    if not 0 <= p < 1:
        raise ValueError(f"{name}: expected a probability from 0 to below 1; got {p}")


def settle(options: Options, q: Tensor, v: Tensor) -> Options:
    """Checks options of the public functions, and converts them for the operators."""
    if options.scale == 0:
        raise ValueError("scale: expected a number other than 0, or None; got 0")
    if not -_SEEDS <= options.seed < _SEEDS:
        raise ValueError(f"seed: expected a signed 64-bit integer; got {options.seed}")
    check_dropout("dropout_p", options.dropout)
    changes: dict[str, Any] = {}
    for name in _TENSORS:
        tensor = getattr(options, name)
        if tensor is not None:
            changes[name] = _converted(name, tensor, q, v)
    return options._replace(**changes) if changes else options


def _wide(tensor: Tensor | None, q: Tensor) -> Tensor | None:
    """Small inputs in the type the core accumulates in."""
    return None if tensor is None else tensor.to(accumulator(q.dtype)).contiguous()


def named_saved(call: GroupCall, result: GroupResult) -> dict[str, Tensor]:
    """The saved tensors of a pass by name."""
    return dict(zip(call.group.saved_on(call.q), result.saved, strict=True))


def arguments_of(call: GroupCall) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """The operator's arguments: the differentiable ones, the others."""
    group, q, k, v, state, options = call
    centroids = gate = logit_scale = None
    if state is not None:
        centroids = _wide(_centroids(group, state), q)
        gate, logit_scale = _wide(state.gate, q), _wide(state.logit_scale, q)
    rows = (q, k, v, centroids, gate, logit_scale)
    settings = (group.text, options.scale or 0.0, options.causal, options.seed, options.dropout)
    rest = (*options[3:8], _dropout_seed(options.dropout), *settings, *options.part)
    return rows, rest


def _dropout_seed(p: float) -> Tensor | None:
    """Drawn from torch's CPU generator, which checkpointing rewinds; a tensor, to be traceable."""
    return torch.randint(2**63 - 1, (1,), device="cpu") if p else None


def run_group(call: GroupCall, want_saved: bool = False) -> GroupResult:
    """One call of the operator, differentiable."""
    rows, rest = arguments_of(call)
    out, saved = ops.attention(rows, rest, want_saved, call.options.selection)
    return GroupResult(out, saved)


def select(
    group: Group, rows: Rows, state: State | None, options: Options
) -> tuple[Tensor, ...]:
    """The selection that a group makes, for calls on some of its heads."""
    with torch.no_grad():
        q, k, v = rows
        if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
            q, k, v = autocast_rows(q, k, v)
        call = GroupCall(group, q, k, v, state, settle(options, q, v))
        own, rest = arguments_of(call)
        return tuple(operators.attention_select.default(*own, *rest))


def _centroids(group: Group, state: State) -> Tensor | None:
    if group.name != "routing":
        return state.surrogates
    if state.centroids is not None and state.centroids.requires_grad:
        raise ValueError(
            "state.centroids: update_centroids moves them, so they must not require a gradient"
        )
    return state.centroids


def _states(
    state: State | Sequence[State] | None, groups: Sequence[Group]
) -> Sequence[State | None]:
    if state is None:
        return [None] * len(groups)
    states = [state] if isinstance(state, State) else list(state)
    if len(states) != len(groups):
        raise ValueError(
            f"state: expected one State for each of the {len(groups)} groups; got {len(states)}"
        )
    return states


def split_groups(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    groups: Sequence[Group],
    state: State | Sequence[State] | None,
    options: Options,
) -> list[GroupCall]:
    """One call per group on its slice of the heads; k has the heads of groups that take keys."""
    if len(groups) == 1 and (state is None or isinstance(state, State)):
        return [GroupCall(groups[0], q, _own_keys(groups[0], q, k), v, state, options)]
    key_heads = sum(group.key_heads for group in groups)
    if k is not None and k.shape[1] != key_heads:
        raise ValueError(
            f"k: expected {key_heads} heads, those of the groups that have keys; got {k.shape[1]}"
        )
    calls = []
    for g, own in zip(groups, _states(state, groups), strict=True):
        rows = Rows(q, k, v).of(g, 1)
        keys = _own_keys(g, rows.q, rows.k)
        calls.append(GroupCall(g, rows.q, keys, rows.v, own, options_of(options, g)))
    return calls


def _own_keys(group: Group, q: Tensor, k: Tensor | None) -> Tensor | None:
    if not group.keys_are_queries:
        if k is None:
            raise ValueError(f"k: {group.text} needs keys; got None")
        return k
    if k is not None and k is not q:
        raise ValueError(f"k: the keys of {group.text} are its queries, so k must be None")
    return None


def options_of(options: Options, group: Group) -> Options:
    """The options with the mask of the group's heads."""
    if options.mask is None:
        return options
    return options._replace(mask=options.mask.narrow(1, group.first, group.heads))


def autocast_rows(q: Tensor, k: Tensor | None, v: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Under autocast attention runs in the lower precision, as torch's own does."""
    if q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), None if k is None else k.to(dtype), v.to(dtype)


def _refuse_positions(groups: Sequence[Group]) -> None:
    for group in groups:
        if group.positions_named and group.positions != "none":
            raise ValueError(
                f"spec: q and k are used as they are, without positions={group.positions}; "
                "coterie.nn.Attention applies positions"
            )


def run_spec(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    spec: str,
    state: State | Sequence[State] | None,
    options: Options,
    want_saved: bool,
) -> tuple[list[GroupCall], list[GroupResult]]:
    """Attention by a spec: the calls of its groups, and their results."""
    if q.dim() != 4 or v.dim() != 4 or (k is not None and k.dim() != 4):
        _refuse_rows(q, k, v)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        same = k is q
        q, k, v = autocast_rows(q, None if same else k, v)
        k = q if same else k
    groups = head_groups(spec, q.shape[1], options.causal, v.shape[1])
    _refuse_positions(groups)
    if options.selection and len(groups) > 1:
        raise ValueError(f"selection: expected a spec of one group; got {spec}")
    calls = split_groups(q, k, v, groups, state, settle(options, q, v))
    return calls, [run_group(call, want_saved) for call in calls]
