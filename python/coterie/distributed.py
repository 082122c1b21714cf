# SPDX-License-Identifier: MIT
"""Attention over sequences that several ranks share: context parallel, Ulysses.

Each of P ranks has a slice of every sequence. An all-to-all gives it the whole sequences of 1/P of
the heads, any attention runs on them unchanged, and a second all-to-all returns the outputs of its
positions (Jacobs et al. 2023). The heads of ``cast`` choose their clusters together, so each rank
gets the queries and keys of all heads for that choice (without gradients)::

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("context",))
    mine = coterie.distributed.positions(65536, mesh)  # this rank's slice
    out = coterie.distributed.ulysses(coterie.attention, q, k, v, "local(window=256)", group=mesh)

Data parallel training needs nothing from here: ``DistributedDataParallel`` and ``fully_shard`` work
with :mod:`coterie.nn`, whose ``update_centroids`` is over the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .functional import Options, Rows, select
from .spec import Group, head_groups
from .state import State

__all__ = ["positions", "ulysses"]

Ranks = dist.ProcessGroup | DeviceMesh | None


def positions(length: int, group: Ranks = None) -> slice:
    """The positions of this rank in sequences of ``length``; sizes differ by at most one.

    Args:
        length: N of the whole sequences.
        group: a process group, a device mesh of one dimension, or None for all ranks.
    """
    own = _process_group(group)
    return _slice(length, dist.get_rank(own), dist.get_world_size(own))


def ulysses(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    *args: Any,
    group: Ranks = None,
    length: int | None = None,
    **options: Any,
) -> Tensor:
    """``attention(q, k, v, *args, **options)`` over sequences that the ranks of a group share.

    Args:
        attention: :func:`coterie.attention`, ``F.scaled_dot_product_attention`` or any function of
            tensors (B, H, N, D) whose heads are independent. It gets the whole sequences of this
            rank's heads.
        q, k, v: (B, heads, n, D), this rank's positions of all heads; k None as in
            :func:`coterie.attention`. The number of ranks must divide the heads of every group of
            the spec.
        group: a process group, a device mesh of one dimension, or None for all ranks.
        length: N of the whole sequences; n times the number of ranks by default. Needed if ranks
            have slices of different sizes, which :func:`positions` returns.
        args, options: further arguments, equal on all ranks. Lengths and masks are those of whole
            sequences. For :func:`coterie.attention` a state and a mask have all heads, as without
            ranks, and a gate (B, n) this rank's positions; results are those of one process, with
            dropout if torch's CPU generators are equal. Other functions get tensors as they are.

    Returns:
        (B, H, n, Dv): the outputs of this rank's positions, differentiable.
    """
    from . import attention as by_spec  # the package imports this module

    own = _process_group(group)
    size, rank = dist.get_world_size(own), dist.get_rank(own)
    N = q.shape[2] * size if length is None else length
    expected = _slice(N, rank, size)
    if q.shape[2] != expected.stop - expected.start:
        raise ValueError(
            f"q: expected {expected.stop - expected.start} of {N} positions on rank {rank}; "
            f"got {q.shape[2]} (coterie.distributed.positions says which)"
        )
    exchange = _Exchange(own, rank, size, N)
    if attention is not by_spec:
        _check_heads(q.shape[1], v.shape[1], size, "")
        heads = [x for x in (q, k, v) if x is not None]
        whole = iter(exchange.to_heads(heads))
        rows = Rows(next(whole), None if k is None else next(whole), next(whole))
        return exchange.to_positions([attention(*rows, *args, **options)])[0]
    return _by_spec(exchange, Rows(q, k, v), by_spec, *args, **options)


def _by_spec(
    exchange: _Exchange,
    rows: Rows,
    attention: Callable[..., Tensor],
    spec: str,
    *,
    state: State | Sequence[State] | None = None,
    mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """One call for each group of the spec, of which every rank has a part."""
    causal = bool(options.get("causal") or options.get("is_causal"))
    groups = head_groups(spec, rows.q.shape[1], causal, rows.v.shape[1])
    states = [state] * len(groups) if state is None or isinstance(state, State) else list(state)
    parts: list[Tensor] = []
    for group in groups:
        _check_heads(group.heads, group.kv_heads, exchange.size, f" of {group.text}")
        parts += [x for x in _own(rows, group) if x is not None]
    whole = iter(exchange.to_heads(parts))
    outputs = []
    for group, own in zip(groups, states, strict=True):
        mine = _own(rows, group)
        q, k, v = (None if x is None else next(whole) for x in mine)
        all_heads = None if own is None else exchange.with_whole_gate(own)
        selection: tuple[Tensor, ...] = ()
        if group.selects_together:
            selection = _choose(exchange, mine, group, all_heads, options)
        outputs.append(
            attention(
                q,
                k,
                v,
                group.text,
                state=None if all_heads is None else exchange.state(all_heads),
                mask=None if mask is None else exchange.mask(mask, group, rows.q.shape[1]),
                part=(exchange.rank, exchange.size),
                selection=selection,
                **options,
            )
        )
    outputs = exchange.to_positions(outputs)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _choose(
    exchange: _Exchange, rows: Rows, group: Group, state: State | None, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """The selection of all heads, from this rank's positions; every rank makes the same one."""
    with torch.no_grad():
        heads = [x for x in (rows.q, rows.k) if x is not None]
        whole = exchange.to_all([x.transpose(1, 2) for x in heads])
        q, *k = (x.transpose(1, 2) for x in whole)
        keys = k[0] if k else q
        # Of values only the shape counts.
        known = {name: options[name] for name in Options._fields if name in options}
        return select(group, Rows(q, k[0] if k else None, keys), state, Options(**known))


def _own(rows: Rows, group: Group) -> Rows:
    own = rows.of(group, 1)
    return own._replace(k=None) if group.keys_are_queries else own


def _process_group(group: Ranks) -> dist.ProcessGroup | None:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"group: expected a device mesh of one dimension, such as mesh['context']; got "
            f"{group.ndim}"
        )
    found: dist.ProcessGroup = group.get_group()
    return found


def _slice(length: int, rank: int, size: int) -> slice:
    return slice(length * rank // size, length * (rank + 1) // size)


def _check_heads(heads: int, kv_heads: int, ranks: int, where: str) -> None:
    if heads % ranks or kv_heads % ranks:
        raise ValueError(
            f"q, v: expected heads{where} that {ranks} ranks can share equally; got {heads} query "
            f"and {kv_heads} key/value heads"
        )


class _AllToAll(torch.autograd.Function):
    """Sends to[i] elements to rank i, gets back[i] from it; the gradient returns the same way."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, to: list[int], back: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.settings = back, to, group
        got = flat.new_empty(sum(back))
        dist.all_to_all_single(got, flat.contiguous(), back, to, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], *ctx.settings), None, None, None


def _all_to_all(
    flat: Tensor, to: list[int], back: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    apply: Callable[..., Tensor] = _AllToAll.apply  # has types in newer versions of torch only
    return apply(flat, to, back, group)


class _Exchange:
    """Between this rank's positions of all heads and all positions of this rank's heads."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, length: int) -> None:
        self.group, self.rank, self.size, self.length = group, rank, size, length
        self.slices = [_slice(length, i, size) for i in range(size)]

    def to_heads(self, parts: list[Tensor]) -> list[Tensor]:
        """(B, H, n, D) -> (B, H / P, N, D), one all-to-all for all parts."""
        out = [[x.chunk(self.size, 1)[i] for x in parts] for i in range(self.size)]
        counts = [s.stop - s.start for s in self.slices]
        shapes = [[(*x.shape[:2], n, x.shape[3]) for x in out[self.rank]] for n in counts]
        return self._run(out, shapes, 2)

    def to_positions(self, parts: list[Tensor]) -> list[Tensor]:
        """The inverse."""
        out = [[x[:, :, s] for x in parts] for s in self.slices]
        return self._run(out, [[tuple(x.shape) for x in out[self.rank]]] * self.size, 1)

    def _run(
        self, out: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], dim: int
    ) -> list[Tensor]:
        flat = torch.cat([x.reshape(-1) for parts in out for x in parts])
        to = [sum(x.numel() for x in parts) for parts in out]
        sizes = [[torch.Size(shape).numel() for shape in parts] for parts in shapes]
        got = _all_to_all(flat, to, [sum(parts) for parts in sizes], self.group)
        pieces = iter(got.split([size for parts in sizes for size in parts]))
        ranks = [[next(pieces).view(shape) for shape in parts] for parts in shapes]
        return [torch.cat(part, dim) for part in zip(*ranks, strict=True)]

    def to_all(self, parts: list[Tensor]) -> list[Tensor]:
        """(B, n, ...) -> (B, N, ...) on every rank; the gradients of all ranks are added."""
        copies = [x.flatten(2) if x.dim() > 2 else x.unsqueeze(2) for x in parts]
        heads = [x.unsqueeze(1).expand(-1, self.size, -1, -1) for x in copies]
        shapes = [(x.shape[0], self.length, *x.shape[2:]) for x in parts]
        whole = zip(self.to_heads(heads), shapes, strict=True)
        return [x.reshape(shape) for x, shape in whole]

    def with_whole_gate(self, state: State) -> State:
        return state if state.gate is None else state._replace(gate=self.to_all([state.gate])[0])

    def heads(self, tensor: Tensor | None, dim: int = 0) -> Tensor | None:
        """Of a tensor of all heads, those of this rank."""
        return None if tensor is None else tensor.chunk(self.size, dim)[self.rank]

    def state(self, state: State) -> State:
        own = State(*[self.heads(x) for x in state._replace(gate=None)])
        return own._replace(gate=state.gate)

    def mask(self, mask: Tensor, group: Group, heads: int) -> Tensor:
        if mask.dim() < 3 or mask.shape[-3] != heads:
            return mask
        own: Tensor = mask.narrow(-3, group.first, group.heads)
        return own.chunk(self.size, mask.dim() - 3)[self.rank]
