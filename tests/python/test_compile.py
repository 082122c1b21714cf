# SPDX-License-Identifier: MIT
"""Compiled, exported, autocast and checkpointed calls give the results of plain ones."""

from __future__ import annotations

import shutil

import pytest
import torch
from problems import IDS, SPECS, Problem, make_problem
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import coterie
import coterie.nn


def _loss(problem: Problem) -> Tensor:
    out = problem.run()
    return (out * torch.arange(out.numel()).view_as(out)).sum()


def _gradients(problem: Problem, loss: Tensor) -> tuple[Tensor, ...]:
    rows = [x for x in (problem.q, problem.k, problem.v) if x is not None]
    return torch.autograd.grad(loss, rows)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_a_whole_graph_gives_the_same_bits(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, padded=True).differentiable()
    compiled = torch.compile(lambda: _loss(problem), fullgraph=True, backend="aot_eager")()
    eager = _loss(problem)
    assert torch.equal(compiled, eager)
    pairs = zip(_gradients(problem, compiled), _gradients(problem, eager), strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)


def test_one_graph_serves_all_lengths() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    call = torch.compile(
        lambda q, k, v: coterie.attention(q, k, v, "i-clustered(clusters=4,topk=8)"),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for N in (16, 33, 50):
        q, k, v = torch.randn(3, 2, 4, N, 8)
        expected = coterie.attention(q, k, v, "i-clustered(clusters=4,topk=8)")
        assert torch.equal(call(q, k, v), expected)
    assert len(graphs) <= 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler on the CPU")
def test_inductor_compiles_a_layer() -> None:
    layer = coterie.nn.Attention(32, 4, "2*local(window=8)+2*i-clustered(clusters=4,topk=8)")
    x = torch.randn(2, 24, 32)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    compiled(x)[0].square().mean().backward()
    got = layer.q.weight.grad.clone()
    layer.zero_grad()
    layer(x)[0].square().mean().backward()
    torch.testing.assert_close(got, layer.q.weight.grad)


def test_a_layer_with_routing_trains_in_a_whole_graph() -> None:
    spec = "routing(clusters=3,window=6,share_qk=true)"
    layer = coterie.nn.Attention(32, 4, spec, causal=True)
    x = torch.randn(2, 24, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(x)[0]
    torch.testing.assert_close(out, layer(x)[0])
    loss = coterie.nn.commitment_loss(layer)
    (out.square().mean() + loss).backward()
    before = layer.group_0.centroids.clone()
    coterie.nn.update_centroids(layer)
    assert not torch.equal(before, layer.group_0.centroids)


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = coterie.nn.Attention(32, 4, "i-clustered(clusters=4,topk=8)")

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)[0]


def test_an_exported_layer_takes_any_length(tmp_path: object) -> None:
    layer = _Layer().eval()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(layer, (torch.randn(2, 24, 32),), dynamic_shapes=({1: length},))
    torch.export.save(program, f"{tmp_path}/layer.pt2")
    loaded = torch.export.load(f"{tmp_path}/layer.pt2").module()
    for N in (24, 57):
        x = torch.randn(2, N, 32)
        torch.testing.assert_close(loaded(x), layer(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_runs_in_the_lower_precision(compiled: bool) -> None:
    problem = make_problem("i-clustered(clusters=3,topk=4)")
    run = torch.compile(problem.run, backend="aot_eager") if compiled else problem.run
    with torch.autocast("cpu", torch.bfloat16):
        out = run()
    assert out.dtype == torch.bfloat16
    low = Problem(
        *(x.bfloat16() for x in (problem.q, problem.k, problem.v)), problem.spec, problem.options
    )
    assert torch.equal(out, low.run())


def test_autocast_keeps_the_centroids_of_a_layer() -> None:
    layer = coterie.nn.Attention(32, 4, "routing(clusters=3,window=6)", causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(2, 24, 32))[0]
        (out.float().square().mean() + coterie.nn.commitment_loss(layer)).backward()
    coterie.nn.update_centroids(layer)
    assert out.dtype == torch.bfloat16
    assert layer.group_0.centroids.dtype == torch.float32
    assert layer.q.weight.grad.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_clusters(reentrant: bool) -> None:
    layer = coterie.nn.Attention(32, 4, "i-clustered(clusters=4,topk=3)")
    x = torch.randn(2, 40, 32, requires_grad=True)
    layer(x)[0].square().sum().backward()
    plain = x.grad.clone()
    x.grad = None
    out = checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant)
    out.square().sum().backward()
    assert torch.equal(x.grad, plain)
