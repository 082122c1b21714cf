# SPDX-License-Identifier: MIT
"""Operators on a GPU: registration, stream, refusals; tests/gpu has the numbers of the kernels."""

from __future__ import annotations

import pytest
import torch
from problems import Problem, make_problem

import coterie
from coterie.library import build_facts

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or build_facts()["cuda_toolkit"] == "none",
    reason="needs a GPU and CUDA kernels",
)
SPECS = ["clustered(clusters=16)", "i-clustered(clusters=16,topk=32)"]


def _problem(spec: str) -> Problem:
    problem = make_problem(spec, B=2, H=4, Hkv=2, N=300, D=64, dtype=torch.bfloat16, padded=True)
    rows = (x.cuda().requires_grad_() for x in (problem.q, problem.k, problem.v))
    lengths = problem.options["q_lengths"].cuda()
    options = problem.options | {"q_lengths": lengths, "k_lengths": lengths}
    return Problem(*rows, spec, options)


@pytest.mark.parametrize("spec", SPECS)
def test_operators_pass_opcheck_on_the_gpu(spec: str) -> None:
    problem = _problem(spec)
    torch.library.opcheck(torch.ops.coterie.attention.default, problem.arguments())


@pytest.mark.parametrize("spec", SPECS)
def test_calls_run_on_the_current_stream(spec: str) -> None:
    problem = _problem(spec)
    expected = problem.run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = problem.v.detach().clone()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(20_000_000)
        late.mul_(2)
        out = Problem(problem.q, problem.k, late, spec, problem.options).run()
        out.div_(2)
    stream.synchronize()
    torch.testing.assert_close(out, expected.detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("spec", SPECS)
def test_a_call_does_not_wait_for_the_gpu(spec: str) -> None:
    problem = _problem(spec)
    problem.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run().float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_has_no_kernel_says_so() -> None:
    q = torch.randn(1, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="got tensors on cuda"):
        coterie.attention(q, q, q, "local(window=4)")
