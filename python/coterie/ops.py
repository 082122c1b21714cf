# SPDX-License-Identifier: MIT
"""What the operators ``torch.ops.coterie.*`` lack: fake kernels for tracing, and derivatives.

Shapes: x (B, H, N, D), labels (B, H, N) int32; ``lengths`` (B) or ``cu_seqlens`` (items + 1), both
int32, say which rows count. Users call :func:`coterie.attention` and :mod:`coterie.nn`; the
operators check no more than the core does.

attention(q, k?, v, centroids?, gate?, logit_scale?, q_lengths?, k_lengths?, cu_seqlens_q?,
cu_seqlens_k?, mask?, dropout_seed?, mechanism, scale, causal, seed, dropout, head_part, head_parts)
-> out (B, H, N, Dv), saved tensors
    The forward pass; :mod:`coterie.layout` names the saved tensors. ``mechanism`` is the spec of
    one group; ``scale`` 0 stands for the default; ``dropout`` is a probability, and if it is not 0
    ``dropout_seed`` one int64 on the CPU. The heads are part ``head_part`` of ``head_parts`` of a
    larger call, whose random numbers they draw: 0 and 1 for all heads.
attention_forward(...): the same without derivatives
attention_backward(grad_out, ..., out, saved, needs) -> gradients
    Of q, k, v, centroids, gate and logit_scale, where bits 0 to 5 of ``needs`` ask for them.
attention_select(...) -> the selection: the first of the saved tensors, int32
attention_attend(..., selection) -> out, saved tensors
    The forward pass of a given selection; :func:`attention` has its derivatives.
attention_quality(..., out, saved, rows, from_gpu) -> error, norm, mass, bound
    Of up to ``rows`` rows per batch entry, float64 (B, H, R), or (0) if the mechanism has none
    (include/coterie/quality.h). Tensors on the CPU; ``from_gpu`` says where ``out`` was computed.
rotate_rows(x, first, base, inverse) -> rows turned by the angles of positions first, first + 1, ...
normalise_rows(x) -> rows of zero mean and unit variance
routing_labels(x, centroids (H', C, D), lengths?, cu_seqlens?) -> labels
spherical_kmeans(x, lengths?, cu_seqlens?, clusters, iterations, seed) -> centroids (H, C, D)
kmeans(x (P, N, D), centroids?, clusters, iterations, start, fill_empty, seed) -> centroids
(P, C, D), labels (P, N), counts (P, C)
    :func:`coterie.kmeans`; ``start`` 0 is from ``centroids``, 1 random, 2 k-means++.
add_centroid_statistics(members!, sums!, x, labels, lengths?, cu_seqlens?) -> ()
    Adds the rows of each cluster to members (H', C) and their normalised sum to sums (H', C, D),
    both float64.
move_centroids(centroids!, counts!, sums!, members, added, decay) -> ()
    One step of the moving average by statistics ``members`` and ``added``.
commitment_loss(x, centroids (H', C, D), labels, lengths?, cu_seqlens?) -> loss (1)
commitment_loss_backward(...) -> d loss / d x
routing_step(ring_k!, ring_v!, counts!, q, k?, v, centroids, logit_scale?, mechanism, scale) -> out
    Tokens of strict routing, q (B, H, N, D), after those in the rings, which they join: ring_k
    and ring_v (B, key heads, C window, D), counts (B, key heads, C) int64, zeros at first. Key
    heads are those of q where ``mechanism`` has share_qk, else those of k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import accumulator, saved_layout, sizes_of
from .library import NAMESPACE, operators
from .spec import single_group

_DIFFERENTIABLE = 6  # the first arguments of attention
_TENSORS = 12
_ARGUMENTS = 19


def empty_rows(like: Tensor, width: int) -> Tensor:
    """As csrc/bridge.cc: heads before tokens or tokens before heads, as in ``like``."""
    B, H, N, _ = like.shape
    if like.stride(1) >= like.stride(2):
        return like.new_empty((B, H, N, width))
    return like.new_empty((B, N, H, width)).transpose(1, 2)


def _empty_like(input: Tensor) -> Tensor:
    return empty_rows(input, input.shape[3]) if input.dim() == 4 else input.new_empty(input.shape)


def _fake_saved(args: tuple[Any, ...], selection_only: bool) -> list[Tensor]:
    q, v, cu_seqlens_q, mechanism, causal = args[0], args[2], args[8], args[12], args[14]
    group = single_group(mechanism, causal)
    wide = accumulator(q.dtype)
    return [
        q.new_empty(saved.shape, dtype=torch.int32 if saved.whole else wide)
        for saved in saved_layout(group, sizes_of(group, q, v, cu_seqlens_q), q.is_cuda)
        if saved.selection or not selection_only
    ]


def _fake_attention(*args: Any) -> tuple[Tensor, list[Tensor]]:
    q, v = args[0], args[2]
    return empty_rows(q, v.shape[3]), _fake_saved(args, selection_only=False)


def _fake_gradients(grad_out: Tensor, *args: Any) -> list[Tensor]:
    return [_empty_like(args[i]) for i in range(_DIFFERENTIABLE) if args[-1] >> i & 1]


def _fake_rows(x: Tensor, *args: Any) -> Tensor:
    return empty_rows(x, x.shape[3])


def _fake_wide(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=accumulator(x.dtype))


_FAKES: dict[str, Callable[..., Any]] = {
    "attention": _fake_attention,
    "attention_forward": _fake_attention,
    "attention_backward": _fake_gradients,
    "attention_attend": _fake_attention,
    "attention_select": lambda *args: _fake_saved(args, selection_only=True),
    "rotate_rows": _fake_rows,
    "normalise_rows": lambda x: _fake_wide(x, *x.shape),
    "routing_labels": lambda x, *_: x.new_empty(x.shape[:3], dtype=torch.int32),
    "spherical_kmeans": lambda x, *a: _fake_wide(x, x.shape[1], a[2], x.shape[3]),
    "kmeans": lambda x, _, clusters, *a: (
        _fake_wide(x, x.shape[0], clusters, x.shape[2]),
        x.new_empty(x.shape[:2], dtype=torch.int32),
        x.new_empty((x.shape[0], clusters), dtype=torch.int32),
    ),
    "add_centroid_statistics": lambda *_: None,
    "move_centroids": lambda *_: None,
    "commitment_loss": lambda x, *_: _fake_wide(x, 1),
    "commitment_loss_backward": _fake_rows,
    "routing_step": lambda ring_k, ring_v, counts, q, *_: empty_rows(q, ring_v.shape[3]),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake)


def _gradients(ctx: Any, grad_out: Tensor | None) -> list[Tensor | None]:
    """Of the differentiable arguments."""
    gradients: list[Tensor | None] = [None] * _DIFFERENTIABLE
    if grad_out is None:
        return gradients
    _check_first_order("attention")
    tensors = ctx.saved_tensors
    needed = [i for i in range(_DIFFERENTIABLE) if ctx.needs_input_grad[i]]
    found = operators.attention_backward.default(
        grad_out,
        *tensors[:_TENSORS],
        *ctx.settings,
        tensors[_TENSORS],
        tensors[_TENSORS + 1 :],
        sum(1 << i for i in needed),
    )
    for i, gradient in zip(needed, found, strict=True):
        gradients[i] = gradient
    return gradients


def _check_first_order(op: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(f"[{op}] double backward is not supported; got create_graph=True")


def _keep(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Sequence[Tensor]]) -> None:
    out, saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*inputs[:_TENSORS], out, *saved)
    ctx.settings = inputs[_TENSORS:]


def _differentiate(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    return (*_gradients(ctx, grad_out), *[None] * (_ARGUMENTS - _DIFFERENTIABLE))


torch.library.register_autograd(f"{NAMESPACE}::attention", _differentiate, setup_context=_keep)
_forward = operators.attention_forward.default
_attend = operators.attention_attend.default


class _Attention(torch.autograd.Function):
    """The same derivative; outside of graphs it is called ten times as fast as a registered one.

    Takes the differentiable arguments, the others as one tuple, a selection or none, and whether
    the saved tensors are wanted beside the output: each output costs.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor | tuple[Tensor, ...]:
        inputs = (*args[:_DIFFERENTIABLE], *args[_DIFFERENTIABLE])
        selection = args[_DIFFERENTIABLE + 1]
        out, saved = output = _attend(*inputs, selection) if selection else _forward(*inputs)
        _keep(ctx, inputs, output)
        if not args[-1]:
            alone: Tensor = out
            return alone
        ctx.set_materialize_grads(False)
        return out, *saved

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, grad_out), None, None, None)


_apply: Callable[..., Any] = _Attention.apply


def attention(
    rows: tuple[Tensor | None, ...],
    rest: tuple[Any, ...],
    want_saved: bool,
    selection: Sequence[Tensor] = (),
) -> tuple[Tensor, Sequence[Tensor]]:
    """coterie::attention by the quickest way to call it: differentiable arguments, the others."""
    result: tuple[Tensor, Sequence[Tensor]]
    if torch.compiler.is_compiling() and not selection:
        result = operators.attention.default(*rows, *rest)
        return result
    if torch.is_grad_enabled():
        for tensor in rows:
            if tensor is not None and tensor.requires_grad:
                found = _apply(*rows, rest, selection, want_saved)
                return (found[0], found[1:]) if want_saved else (found, ())
    result = _attend(*rows, *rest, selection) if selection else _forward(*rows, *rest)
    return result


def _keep_rotation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rotation = inputs[1:]


def _differentiate_rotation(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    first, base, inverse = ctx.rotation
    return operators.rotate_rows(grad, first, base, not inverse), None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::rotate_rows", _differentiate_rotation, setup_context=_keep_rotation
)


def _save_commitment(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_commitment(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _check_first_order("commitment_loss")
    x, *rest = ctx.saved_tensors
    # In the accumulator's type until it is scaled: with a weight of 1 it underflows in float16.
    dx = operators.commitment_loss_backward(x.to(accumulator(x.dtype)), *rest)
    return (dx * grad).to(x.dtype), None, None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::commitment_loss", _differentiate_commitment, setup_context=_save_commitment
)
