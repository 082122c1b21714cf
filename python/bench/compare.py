# SPDX-License-Identifier: MIT
r"""Times attention specs against other installed implementations, on the same tensors.

    python python/bench/compare.py --lengths 1024 4096 --spec "i-clustered(clusters=64,topk=32)"
    python python/bench/compare.py --device cuda --dtype bfloat16 --heads 16 --causal --flex \
        --window 256 --lengths 4096 16384 --spec "local(window={window})" \
        "routing(clusters={clusters},window={window})"

Opponents: the back ends of torch's scaled_dot_product_attention, FlexAttention with a sliding
window (--flex), pytorch-fast-transformers (improved clustered) and routing-transformer where they
can be imported, and routing's clusters attended by gathering rows for scaled_dot_product_attention.
Clustered ones have N / --window clusters. Columns: median time, memory that the forward pass takes
beyond its inputs (CUDA: peak allocated; CPU: what stays allocated, outputs and saved tensors),
relative error of the output against full attention in float64 on 256 rows of the first batch entry
(meaningless for routing, whose logits differ). --overhead times a call on one token instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import opponents
import torch
from opponents import Call, Setting
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import coterie


class Row(NamedTuple):
    """One line of the table; the times are in milliseconds."""

    name: str
    n: int
    forward: float
    both: float | None
    megabytes: float
    error: float


def _seconds(call: Callable[[], object], device: str, times: int) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def _median(call: Callable[[], object], device: str, repeats: int) -> float:
    """Milliseconds per call; short calls are timed several in a row, as in a model."""
    _seconds(call, device, 1)
    times = max(1, min(50, int(0.005 / _seconds(call, device, 1))))
    return statistics.median(_seconds(call, device, times) for _ in range(repeats)) * 1e3


def _megabytes(call: Callable[[], Tensor], device: str) -> float:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(call())
    return sum(kept.values()) / 2**20


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    rows = torch.linspace(0, q.shape[2] - 1, min(256, q.shape[2]), device=q.device).long()
    mask = torch.arange(q.shape[2], device=q.device) <= rows[:, None] if causal else None
    exact = sdpa(q[:1, :, rows].double(), k[:1].double(), v[:1].double(), attn_mask=mask)
    return ((out[:1, :, rows].double() - exact).norm() / exact.norm()).item()


def measure(name: str, call: Call, rows: tuple[Tensor, ...], options: argparse.Namespace) -> Row:
    """Times one attention."""
    device = options.device
    leaves = [x.detach().requires_grad_() for x in rows]
    grad = torch.randn_like(rows[0])

    def both() -> None:
        torch.autograd.grad(call(*leaves), leaves, grad)

    with torch.no_grad():
        forward = _median(lambda: call(*rows), device, options.repeats)
        error = _error(call(*rows), *rows, options.causal)
    try:
        backward = _median(both, device, options.repeats)
    except RuntimeError as reason:
        print(f"{name}: no backward pass: {str(reason).splitlines()[0][:90]}")
        backward = None
    return Row(
        name, rows[0].shape[2], forward, backward, _megabytes(lambda: call(*leaves), device), error
    )


def _attentions(q: Tensor, options: argparse.Namespace) -> Iterator[tuple[str, Call]]:
    clusters = max(1, q.shape[2] // options.window)
    setting = Setting(options.causal, clusters, options.window)
    for spec in options.spec:
        yield opponents.ours(spec, setting, q)
    yield from opponents.sdpa_backends(setting)
    yield from opponents.gathered(setting, q)
    yield from opponents.fast_transformers(setting)
    yield from opponents.routing_transformer(setting, q)
    if options.flex:
        yield from opponents.flex(setting, q)


def compare(options: argparse.Namespace) -> Iterator[Row]:
    """All attentions at all lengths."""
    torch.manual_seed(0)
    for n in options.lengths:
        shape = (options.batch, options.heads, n, options.head_dim)
        kind = {"device": options.device, "dtype": getattr(torch, options.dtype)}
        rows = tuple(torch.randn(shape, **kind) for _ in range(3))
        for name, call in _attentions(rows[0], options):
            if name in options.skip:
                continue
            try:
                yield measure(name, call, rows, options)
            except (RuntimeError, AssertionError, torch.OutOfMemoryError) as reason:
                print(f"{name}: left out: {str(reason).splitlines()[0][:90]}")


def overhead(repeats: int = 200) -> dict[str, float]:
    """Microseconds of a call on one token: the call overhead."""
    q = torch.randn(1, 1, 1, 8)
    leaf = q.clone().requires_grad_()
    operator = torch.ops.coterie.attention_forward.default
    absent = (None,) * 9
    calls = {
        "sdpa": lambda: sdpa(q, q, q),
        "sdpa with gradient": lambda: sdpa(leaf, leaf, leaf),
        "operator": lambda: operator(q, q, q, *absent, "full", 0.0, False, 0, 0.0, 0, 1),
        "coterie.attention": lambda: coterie.attention(q, q, q, "full"),
        "coterie.attention with gradient": lambda: coterie.attention(leaf, leaf, leaf, "full"),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(50):  # interleaved, so that all see the same noise; the minimum counts
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            best[name] = min(best[name], (time.perf_counter() - begin) / repeats * 1e6)
    return best


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--spec", nargs="+", default=["i-clustered(clusters=64,topk=32)"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int, default=64, help="tokens of a cluster or window")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, which compiles")
    parser.add_argument("--skip", nargs="+", default=[], help="names in the table to leave out")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--overhead", action="store_true", help="time calls on one token instead")
    return parser.parse_args()


def main() -> None:
    """Prints the table."""
    options = _options()
    if options.overhead:
        for name, microseconds in overhead().items():
            print(f"{name:34}{microseconds:8.1f} us")
        return
    header = f"{'attention':48}{'N':>8}{'forward':>11}{'fwd+bwd':>11}{'memory':>10}{'error':>10}"
    print(header)
    for row in compare(options):
        both = "" if row.both is None else f"{row.both:.2f} ms"
        times = f"{row.forward:8.2f} ms{both:>11}{row.megabytes:7.1f} MB"
        print(f"{row.name:48}{row.n:8}{times}{row.error:10.2e}")


if __name__ == "__main__":
    main()
