# SPDX-License-Identifier: MIT
"""Times attention specs beside what else is installed, on the same tensors.

    python python/bench/compare.py --lengths 1024 4096 --spec "i-clustered(clusters=64,topk=32)"

Opponents: the back ends of torch's scaled_dot_product_attention, FlexAttention,
pytorch-fast-transformers (improved clustered) and routing-transformer where they can be imported.
Columns: median time, memory that the call takes beyond its inputs (CUDA: peak allocated; CPU: what
stays allocated, outputs and saved tensors), relative error of the output against full attention in
float64 on 256 rows of the first batch entry. --overhead times a call on almost nothing instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import coterie

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Row(NamedTuple):
    """One line of the table; the times are in milliseconds."""

    name: str
    n: int
    forward: float
    both: float | None
    megabytes: float
    error: float


def _sdpa_backends(causal: bool) -> Iterator[tuple[str, Call]]:
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def call(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(q, k, v, is_causal=causal)

        yield f"sdpa {backend.name.lower().removesuffix('_attention')}", call


def _flex(causal: bool) -> Iterator[tuple[str, Call]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block_mask = None
        if causal:
            length = q.shape[2]
            block_mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=q.device.type
            )
        return compiled(q, k, v, block_mask=block_mask)

    yield "flex", call


def _fast_transformers(clusters: int, topk: int) -> Iterator[tuple[str, Call]]:
    if importlib.util.find_spec("fast_transformers") is None:
        return
    from fast_transformers.attention import ImprovedClusteredAttention
    from fast_transformers.masking import FullMask, LengthMask

    attention = ImprovedClusteredAttention(clusters, topk=topk, bits=63, attention_dropout=0.0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        n = q.shape[2]
        whole = LengthMask(torch.full((q.shape[0],), n, device=q.device))
        out = attention(*rows, FullMask(n, device=q.device), whole, whole)
        return out.transpose(1, 2)

    yield "fast-transformers", call


def _routing_transformer(clusters: int, window: int, q: Tensor) -> Iterator[tuple[str, Call]]:
    if importlib.util.find_spec("routing_transformer") is None:
        return
    from routing_transformer.routing_transformer import KmeansAttention

    attention = KmeansAttention(clusters, window, q.shape[1], q.shape[3]).to(q.device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)[0]

    yield "routing-transformer", call


def _ours(spec: str, causal: bool, q: Tensor) -> Call:
    state = coterie.init_state(spec, q.shape[1], q.shape[3], causal=causal, device=q.device)
    shared = all(g.keys_are_queries for g in coterie.head_groups(spec, q.shape[1], causal))
    if isinstance(state, coterie.State) and state.surrogates is not None:
        state = state._replace(gate=torch.zeros(q.shape[0], q.shape[2], device=q.device))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return coterie.attention(q, None if shared else k, v, spec, state=state, causal=causal)

    return call


def _median(call: Callable[[], object], device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):  # two to warm up
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]) * 1e3


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
    except RuntimeError:  # no backward pass there
        backward = None
    return Row(
        name, rows[0].shape[2], forward, backward, _megabytes(lambda: call(*leaves), device), error
    )


def _attentions(q: Tensor, options: argparse.Namespace) -> Iterator[tuple[str, Call]]:
    yield from _sdpa_backends(options.causal)
    if options.flex:
        yield from _flex(options.causal)
    clusters = max(1, q.shape[2] // 64)
    if not options.causal:
        yield from _fast_transformers(clusters, 32)
    yield from _routing_transformer(clusters, 64, q)
    for spec in options.spec:
        yield spec, _ours(spec, options.causal, q)


def compare(options: argparse.Namespace) -> Iterator[Row]:
    """All attentions at all lengths."""
    for n in options.lengths:
        shape = (options.batch, options.heads, n, options.head_dim)
        kind = {"device": options.device, "dtype": getattr(torch, options.dtype)}
        rows = tuple(torch.randn(shape, **kind) for _ in range(3))
        for name, call in _attentions(rows[0], options):
            try:
                yield measure(name, call, rows, options)
            except (RuntimeError, AssertionError, torch.OutOfMemoryError) as reason:
                print(f"{name}: left out: {str(reason).splitlines()[0][:90]}")


def overhead(repeats: int = 200) -> dict[str, float]:
    """Microseconds of a call on one token: what calling costs."""
    q = torch.randn(1, 1, 1, 8)
    leaf = q.clone().requires_grad_()
    operator = torch.ops.coterie.attention_forward.default
    absent = (None,) * 8
    calls = {
        "sdpa": lambda: sdpa(q, q, q),
        "sdpa with gradient": lambda: sdpa(leaf, leaf, leaf),
        "operator": lambda: operator(q, q, q, *absent, "full", 0.0, False, 0),
        "coterie.attention": lambda: coterie.attention(q, q, q, "full"),
        "coterie.attention with gradient": lambda: coterie.attention(leaf, leaf, leaf, "full"),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(50):  # in turn, so that all meet the same disturbances; the least counts
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
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, which compiles")
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
    header = f"{'attention':44}{'N':>8}{'forward':>11}{'fwd+bwd':>11}{'memory':>10}{'error':>10}"
    print(header)
    for row in compare(options):
        both = "" if row.both is None else f"{row.both:.2f} ms"
        times = f"{row.forward:8.2f} ms{both:>11}{row.megabytes:7.1f} MB"
        print(f"{row.name:44}{row.n:8}{times}{row.error:10.2e}")


if __name__ == "__main__":
    main()
