# SPDX-License-Identifier: MIT
"""Operators on a GPU: results as on the CPU, stream, graphs, compilers, refusals.

Problems that the CUDA kernels refuse are skipped with the reason; tests/gpu checks every stage.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import SPECS, Problem, make_problem
from torch import Tensor

import coterie
import coterie.nn
from coterie.library import build_facts

WITH_GPU = torch.cuda.is_available() and build_facts()["cuda_toolkit"] != "none"
needs_gpu = pytest.mark.skipif(not WITH_GPU, reason="needs a GPU and CUDA kernels")
# The small forms of all mechanisms, and some that fill whole tiles.
CASES = [
    *SPECS,
    ("local(window=64)", True),
    ("i-clustered(clusters=16,topk=32)", False),
    ("routing(clusters=4,window=48)", False),
    ("routing(clusters=4,window=48)", True),
    ("routing(clusters=4,window=48,causal=paper)", True),
    ("cast(clusters=4,size=48)", False),
]
IDS = [f"{spec}{' causal' if causal else ''}" for spec, causal in CASES]
LEARNT = ("surrogates", "gate", "logit_scale")


def _moved(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """A copy on the GPU, or of another type on the CPU, that requires gradients."""
    if tensor is None:
        return None
    moved = tensor.detach().cuda() if dtype is None else tensor.detach().to(dtype)
    return moved.requires_grad_(moved.is_floating_point())


def _copy(problem: Problem, dtype: torch.dtype | None = None) -> Problem:
    options = dict(problem.options)
    for name in ("q_lengths", "k_lengths"):
        if dtype is None and options.get(name) is not None:
            options[name] = options[name].cuda()
    state = options["state"]
    wide = None if dtype is None else torch.promote_types(dtype, torch.float32)
    fields = {name: _moved(tensor, wide) for name, tensor in state._asdict().items()}
    if fields["centroids"] is not None:
        fields["centroids"].requires_grad_(False)
    options["state"] = coterie.State(**fields)
    rows = (_moved(x, dtype) for x in (problem.q, problem.k, problem.v))
    return Problem(*rows, problem.spec, options)


def _leaves(problem: Problem) -> dict[str, Tensor]:
    state = problem.options["state"]
    found = {"q": problem.q, "k": problem.k, "v": problem.v}
    found |= {name: getattr(state, name) for name in LEARNT}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _selection(problem: Problem) -> list[Tensor]:
    with torch.no_grad():
        return torch.ops.coterie.attention_select(*problem.arguments())


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))


def _nudged(problem: Problem, seed: int) -> Problem:
    """Rows changed by 2^-15 of their size: more than the effect of the order of sums."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x.detach() * (1 + 2.0**-15 * torch.randn(x.shape, generator=generator).to(x.dtype))

    rows = {name: nudge(getattr(problem, name)) for name in ("q", "k", "v")}
    return dataclasses.replace(problem, **rows)


def _settled_problem(spec: str, causal: bool, dtype: torch.dtype) -> Problem:
    """A problem on the CPU whose selection does not depend on rounding."""
    for seed in range(50):
        problem = make_problem(
            spec, causal, B=2, H=4, Hkv=2, N=150, D=64, dtype=dtype, padded=True, seed=seed
        )
        selection, exact = _selection(problem), _copy(problem, torch.float64)
        if all(_same(selection, _selection(_nudged(exact, nudge))) for nudge in range(4)):
            return problem
    raise AssertionError("every problem has a selection that depends on rounding")


def _on_gpu(problem: Problem) -> Problem:
    """The problem on the GPU; skips the test if the kernels refuse it."""
    copy = _copy(problem)
    try:
        copy.run()
    except RuntimeError as refusal:
        if "expected tensors on the cpu" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    return copy


def _gpu_problem(spec: str, causal: bool) -> Problem:
    return _on_gpu(
        make_problem(spec, causal, B=2, H=4, Hkv=2, N=150, D=64, dtype=torch.bfloat16, padded=True)
    )


def _bound(dtype: torch.dtype, backward: bool) -> float:
    """Bound on relative Frobenius errors.

    Weights and gradients of scores are rounded to the input's type for the tensor cores: the output
    has that rounding and its own, gradients have those of two successive products. In float32, the
    rounding errors of logits become errors of weights through the exponential.
    """
    unit = torch.finfo(dtype).eps / 2
    if dtype == torch.float32:
        return 3e-5 if backward else 1e-5
    return (5 if backward else 1.5) * unit


def _expect_near(name: str, actual: Tensor, exact: Tensor, bound: float, floor: float) -> None:
    difference = (actual.double().cpu() - exact).norm()
    assert difference <= bound * max(exact.norm().item(), floor), (
        f"{name}: error {difference:.2e}, norm {exact.norm():.2e}"
    )


def _clustered(problem: Problem, selection: list[Tensor]) -> Tensor:
    """Clustered and improved clustered attention for given clusters and top keys, by torch."""
    labels = selection[0].cpu().long()  # -1 in padding
    heads, scale = problem.q.shape[1], problem.q.shape[-1] ** -0.5
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (problem.k, problem.v))
    positions = torch.arange(k.shape[2])
    seen = (positions < problem.options["k_lengths"][:, None])[:, None, None]
    clusters = selection[2].shape[-1] - 1
    member = torch.nn.functional.one_hot(labels + 1, clusters + 1)[..., 1:].double()
    centroids = member.mT @ problem.q / member.sum(2).clamp_min(1).unsqueeze(-1)
    weights = (centroids @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
    if len(selection) == 3:
        return member @ weights @ v
    top = selection[3].cpu().long()  # -1 in empty slots
    listed = torch.zeros(*top.shape[:3], k.shape[2] + 1).scatter_(3, top % (k.shape[2] + 1), 1.0)
    listed = listed[..., :-1].bool()
    mass = (weights * listed).sum(-1, keepdim=True)
    rest = torch.where(listed, 0.0, weights) @ v
    own = (member @ listed.double()).bool()  # the top keys of each query's cluster
    exact = (problem.q @ k.mT * scale).masked_fill(~own, -torch.inf).softmax(-1).nan_to_num(0.0)
    return member @ rest + (member @ mass) * (exact @ v)


def _expected(exact: Problem, selection: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The output in float64, for the selection that the GPU made."""
    if _same(selection, _selection(exact)):
        return exact.run()
    # On tensor cores, queries are compared with centroids that are rounded to the input's type.
    assert dtype != torch.float32 and "clustered" in exact.spec
    if exact.options["causal"]:
        pytest.skip("the GPU chose other clusters, and there is no causal reference for them")
    return _clustered(exact, selection)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("spec", "causal"), CASES, ids=IDS)
def test_results_and_gradients_are_those_of_the_cpu(
    spec: str, causal: bool, dtype: torch.dtype
) -> None:
    problem = _settled_problem(spec, causal, dtype)
    gpu, exact = _on_gpu(problem), _copy(problem, torch.float64)
    expected = _expected(exact, _selection(gpu), dtype)
    out = gpu.run()
    assert out.dtype == dtype
    _expect_near("out", out, expected, _bound(dtype, backward=False), 0.0)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = torch.autograd.grad(expected, _leaves(exact).values(), grad.double())
    found = torch.autograd.grad(out, _leaves(gpu).values(), grad.cuda())
    # Gradients that cancel to almost 0 are compared with the size of the values' gradients.
    values = dict(zip(_leaves(exact), wanted, strict=True))["v"]
    for name, ours, theirs in zip(_leaves(gpu), found, wanted, strict=True):
        floor = values.norm().item() * (theirs.numel() / values.numel()) ** 0.5 / 64
        _expect_near(name, ours, theirs, _bound(dtype, backward=True), floor)


def test_the_reference_for_given_clusters_is_the_cpus() -> None:
    for spec in ("clustered(clusters=3)", "i-clustered(clusters=3,topk=4)"):
        exact = _copy(make_problem(spec, N=40, D=16, padded=True), torch.float64)
        ours, theirs = exact.run(), _clustered(exact, _selection(exact))
        torch.testing.assert_close(ours, theirs)
        leaves = list(_leaves(exact).values())
        pairs = (torch.autograd.grad(out.square().sum(), leaves) for out in (ours, theirs))
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other)


@needs_gpu
@pytest.mark.parametrize(("spec", "causal"), CASES, ids=IDS)
def test_operators_pass_opcheck_on_the_gpu(spec: str, causal: bool) -> None:
    problem = _gpu_problem(spec, causal)
    torch.library.opcheck(torch.ops.coterie.attention.default, problem.arguments())


@needs_gpu
@pytest.mark.parametrize(("spec", "causal"), CASES, ids=IDS)
def test_calls_run_on_the_current_stream(spec: str, causal: bool) -> None:
    problem = _gpu_problem(spec, causal)
    expected = problem.run().detach()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.zeros_like(problem.v, requires_grad=False)
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(20_000_000)
        late.copy_(problem.v)
        out = dataclasses.replace(problem, v=late).run()
    stream.synchronize()
    assert torch.equal(out, expected)


@needs_gpu
@pytest.mark.parametrize(("spec", "causal"), CASES, ids=IDS)
def test_a_call_does_not_wait_for_the_gpu(spec: str, causal: bool) -> None:
    problem = _gpu_problem(spec, causal)
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run().float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize(("spec", "causal"), CASES, ids=IDS)
def test_both_passes_go_into_a_cuda_graph(spec: str, causal: bool) -> None:
    problem = _gpu_problem(spec, causal)
    leaves = list(_leaves(problem).values())
    grad = torch.randn_like(problem.run())

    def both() -> tuple[Tensor, ...]:
        out = problem.run()
        return out, *torch.autograd.grad(out, leaves, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm-up on a side stream, as torch requires
        both()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    for replayed, plain in zip(captured, both(), strict=True):
        assert torch.equal(replayed, plain)


@needs_gpu
@pytest.mark.parametrize(("spec", "causal"), CASES, ids=IDS)
def test_a_whole_graph_gives_the_same_bits_on_the_gpu(spec: str, causal: bool) -> None:
    torch.compiler.reset()
    problem = _gpu_problem(spec, causal)
    leaves = list(_leaves(problem).values())
    compiled = torch.compile(lambda: problem.run(), fullgraph=True, backend="aot_eager")()
    plain = problem.run()
    assert torch.equal(compiled, plain)
    pairs = (torch.autograd.grad(out.float().square().sum(), leaves) for out in (compiled, plain))
    for one, other in zip(*pairs, strict=True):
        assert torch.equal(one, other)


@needs_gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("tokens", [256, 250], ids=["by cuDNN", "by the core"])
@pytest.mark.parametrize("causal", [False, True])
def test_full_attention_has_equal_bits_unless_it_may_be_fast(
    causal: bool, tokens: int, width: int
) -> None:
    rows = torch.randn(4, 2, tokens, 4, width, device="cuda").bfloat16().transpose(2, 3).unbind()
    leaves, grad = [x.requires_grad_() for x in rows[:3]], rows[3]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    attend = torch.nn.functional.scaled_dot_product_attention
    wanted = attend(*exact, is_causal=causal)
    wanted_all = [wanted, *torch.autograd.grad(wanted, exact, grad.double())]

    def passes() -> list[Tensor]:
        out = coterie.attention(*leaves, "full", causal=causal)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    first = passes()
    assert all(_same(first, passes()) for _ in range(3))
    coterie.set_fast(True)
    try:
        fast = passes()
    finally:
        coterie.set_fast(False)
    for found in (first, fast):
        for i, (ours, theirs) in enumerate(zip(found, wanted_all, strict=True)):
            bound = _bound(torch.bfloat16, backward=i > 0)
            _expect_near(str(i), ours, theirs.detach().cpu(), bound, 0.0)


@needs_gpu
def test_a_layer_with_routing_heads_trains_on_the_gpu() -> None:
    torch.manual_seed(0)
    spec = "2*local(window=16)+2*routing(clusters=4,window=16,decay=0.5)"
    layer = coterie.nn.Attention(128, 4, spec, causal=True).cuda()
    x = torch.randn(4, 100, 128, device="cuda")
    target = torch.randn_like(x)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    try:
        layer(x)
    except RuntimeError as refusal:
        if "expected tensors on the cpu" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    coterie.nn.initialise_centroids(layer)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (layer(x)[0] - target).square().mean() + coterie.nn.commitment_loss(layer)
        loss.backward()
        optimizer.step()
        coterie.nn.update_centroids(layer)
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@needs_gpu
def test_what_has_no_kernel_says_so() -> None:
    q, k, v = torch.randn(3, 1, 1, 8, 64, device="cuda", dtype=torch.float64)
    with pytest.raises(RuntimeError, match="got tensors on cuda"):
        coterie.attention(q, k, v, "full")


@needs_gpu
def test_lengths_may_have_any_stride() -> None:
    """Strided lengths are copied, as on the CPU and in the C++ functions on torch tensors."""
    problem = _copy(make_problem("local(window=64)", True, N=130, D=64, padded=True))
    strided = {}
    for name in ("q_lengths", "k_lengths"):
        lengths = problem.options[name]
        strided[name] = torch.stack([lengths, lengths + 1], 1)[:, 0]
        assert not strided[name].is_contiguous()
    assert torch.equal(problem.run(**strided), problem.run())
    x, labels = torch.randn(2, 2, 40, 64).cuda(), torch.zeros(2, 2, 40).int().cuda()
    centroids, lengths = torch.randn(2, 3, 64).cuda(), torch.tensor([[40, 0], [7, 0]]).int().cuda()
    losses = [
        torch.ops.coterie.commitment_loss(x, centroids, labels, own, None)
        for own in (lengths[:, 0], lengths[:, 0].contiguous())
    ]
    assert torch.equal(*losses)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_commitment_gradient_is_scaled_before_it_is_rounded(dtype: torch.dtype) -> None:
    x = torch.randn(16, 8, 4096, 64, device="cuda").to(dtype)
    centroids = torch.randn(8, 4, 64, device="cuda")
    labels = torch.randint(0, 4, (16, 8, 4096), dtype=torch.int32, device="cuda")
    wide, half = x.float().requires_grad_(), x.clone().requires_grad_()
    for rows in (wide, half):
        loss = torch.ops.coterie.commitment_loss(rows, centroids, labels, None, None)
        (loss * 2.0**18).sum().backward()
    info = torch.finfo(dtype)
    bound = (wide.grad.abs() * info.eps / 2).clamp_min(info.smallest_normal * info.eps / 2)
    assert ((half.grad.float() - wide.grad).abs() <= bound).all()
