# SPDX-License-Identifier: MIT
"""coterie.attention: results, gradients, refusals."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import IDS, SPECS, Problem, make_problem
from torch.nn.functional import scaled_dot_product_attention as sdpa

import coterie

EXACT = [
    "full",
    "local(window=200)",
    "oracle-top(topk=100)",
    "clustered(clusters=100)",
    "i-clustered(clusters=3,topk=100)",
]


@pytest.mark.parametrize("spec", EXACT)
def test_full_budget_equals_full_attention(spec: str) -> None:
    problem = make_problem(spec, N=33)
    expected = sdpa(problem.q, problem.k, problem.v, enable_gqa=True)
    torch.testing.assert_close(problem.run(), expected)


def test_causal_attention_is_aligned_at_the_bottom_right() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    out = coterie.attention(q, k, v, "full", causal=True)
    torch.testing.assert_close(out, sdpa(q, k, v, attn_mask=mask))


def test_masks_are_honoured_and_rows_without_keys_are_zero() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    mask = torch.rand(2, 1, 9, 9) < 0.5
    mask[0, 0, 3] = False
    out = coterie.attention(q, k, v, "full", mask=mask)
    assert out[0, :, 3].abs().max() == 0
    expected = sdpa(q, k, v, attn_mask=mask).nan_to_num(0.0)
    expected[0, :, 3] = 0
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_gradients_match_finite_differences(spec: str, causal: bool) -> None:
    if "reference" in spec or "clustering=hamming" in spec:
        pytest.skip("the same kernels as in other specs of the list")
    problem = make_problem(spec, causal, B=1, H=2, Hkv=1, N=9, D=4, dtype=torch.float64)
    problem = problem.differentiable()
    state = problem.options["state"]
    learnt = [t for t in (state.surrogates, state.gate, state.logit_scale) if t is not None]
    rows = [t for t in (problem.q, problem.k, problem.v) if t is not None]
    for tensor in learnt:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda *_: problem.run(), (*rows, *learnt))


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_repeated_calls_give_the_same_bits(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, padded=True)
    assert torch.equal(problem.run(), problem.run())


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_layout_in_memory_does_not_matter(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, padded=True)
    tokens_first = [
        None if x is None else x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in (problem.q, problem.k, problem.v)
    ]
    out = Problem(*tokens_first, spec, problem.options).run()
    assert torch.equal(out, problem.run())
    assert out.transpose(1, 2).is_contiguous()
    strided = [
        None if x is None else x.repeat_interleave(2, -1)[..., ::2]
        for x in (problem.q, problem.k, problem.v)
    ]
    assert torch.equal(Problem(*strided, spec, problem.options).run(), problem.run())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_half_precision_runs_forward_and_backward(
    spec: str, causal: bool, dtype: torch.dtype
) -> None:
    problem = make_problem(spec, causal, dtype=dtype).differentiable()
    out = problem.run()
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert problem.q.grad.isfinite().all()


@settings(max_examples=40)
@given(
    case=st.sampled_from(SPECS),
    B=st.integers(1, 3),
    kv=st.sampled_from([1, 2, 4]),
    N=st.integers(1, 70),
    D=st.sampled_from([1, 3, 8, 17]),
)
def test_any_shape_gives_finite_rows_and_zero_padding(
    case: tuple[str, bool], B: int, kv: int, N: int, D: int
) -> None:
    problem = make_problem(*case, B=B, H=4, Hkv=kv, N=N, D=D).differentiable()
    lengths = torch.tensor([(N * (b + 1)) // B for b in range(B)])
    out = problem.run(q_lengths=lengths, k_lengths=lengths)
    out.square().sum().backward()
    assert out.isfinite().all()
    padding = torch.arange(N) >= lengths[:, None]
    for rows in (out, problem.q.grad, problem.v.grad):
        assert rows.isfinite().all()
        assert rows.transpose(1, 2)[padding].abs().sum() == 0


@settings(max_examples=25)
@given(case=st.sampled_from(SPECS), cut=st.integers(0, 24), seed=st.integers(0, 1000))
def test_packed_sequences_equal_single_ones(case: tuple[str, bool], cut: int, seed: int) -> None:
    spec, causal = case
    problem = make_problem(spec, causal, B=1, N=24, seed=seed)
    if "cast" in spec or "clustered" in spec:  # seeds are per item; the gate spans the row
        return
    cu = torch.tensor([0, cut, 24])
    packed = problem.run(cu_seqlens_q=cu, cu_seqlens_k=cu)
    for begin, end in ((0, cut), (cut, 24)):
        rows = [
            None if x is None else x[:, :, begin:end] for x in (problem.q, problem.k, problem.v)
        ]
        alone = Problem(*rows, spec, problem.options).run()
        if "lsh" in spec and begin:
            continue  # rotations are drawn per item
        torch.testing.assert_close(packed[:, :, begin:end], alone)


@settings(max_examples=25)
@given(
    spec=st.sampled_from(["full", "local(window=5)", "routing(clusters=3,window=5)"]),
    t=st.integers(0, 22),
    seed=st.integers(0, 1000),
)
def test_the_future_has_no_effect_in_strict_forms(spec: str, t: int, seed: int) -> None:
    problem = make_problem(spec, True, N=24, seed=seed)
    before = problem.run()
    for rows in (problem.q, problem.k, problem.v):
        rows[:, :, t + 1 :] = 10 * torch.randn_like(rows[:, :, t + 1 :])
    assert torch.equal(problem.run()[:, :, : t + 1], before[:, :, : t + 1])


def test_groups_of_a_spec_share_out_the_heads() -> None:
    q, k, v = torch.randn(2, 8, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 4, 20, 8)
    spec = "4*local(window=5)+4*routing(clusters=3,window=5,share_qk=true)"
    state = coterie.init_state(spec, 8, 8, num_kv_heads=4, causal=True)
    out = coterie.attention(q, k, v, spec, state=state, causal=True)
    local = coterie.attention(q[:, :4], k, v[:, :2], "local(window=5)", causal=True)
    routing = coterie.attention(
        q[:, 4:],
        None,
        v[:, 2:],
        "routing(clusters=3,window=5,share_qk=true)",
        state=state[1],
        causal=True,
    )
    assert torch.equal(out, torch.cat([local, routing], 1))


REFUSALS = [
    ({"spec": "fulll"}, ValueError, "did you mean"),
    ({"spec": 3}, TypeError, "spec: expected a string"),
    ({"spec": "3*full"}, ValueError, "3"),
    ({"spec": "full(positions=rotary)"}, ValueError, "without positions=rotary"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p: expected a probability from 0 to below 1; got 1"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p: expected a probability"),
    ({"dropout_p": 0.1, "return_stats": True}, ValueError, "return_stats: expected dropout_p 0.0"),
    ({"scale": 0.0}, ValueError, "scale"),
    ({"seed": 2**64}, ValueError, "seed"),
    ({"q_lengths": torch.tensor([1.0, 2.0])}, TypeError, "q_lengths: expected integers"),
    ({"mask": torch.zeros(1)}, TypeError, "mask: expected bool"),
    ({"k": None}, ValueError, "k: full needs keys"),
    ({"q": torch.zeros(2, 3)}, ValueError, r"q: expected shape \(batch, heads"),
    ({"spec": "lsh"}, ValueError, "k must be None"),
    ({"spec": "clustered(clusters=2)", "causal": True}, ValueError, "causal"),
    ({"spec": "clustered(clusters=2)", "mask": torch.ones(1, 1).bool()}, RuntimeError, "a mask is"),
    ({"spec": "routing(clusters=2,window=2)"}, RuntimeError, "expected centroids"),
    ({"state": (coterie.State(), coterie.State())}, ValueError, "state: expected one State"),
    ({"v": torch.zeros(2, 3, 6, 8)}, ValueError, "multiple of the number of key/value"),
]


@pytest.mark.parametrize(("change", "error", "match"), REFUSALS)
def test_what_cannot_be_honoured_is_refused(
    change: dict, error: type[Exception], match: str
) -> None:
    arguments = {name: torch.zeros(2, 4, 6, 8) for name in "qkv"} | {"spec": "full"} | change
    if change.get("v") is not None:
        arguments["k"] = change["v"]
    with pytest.raises(error, match=match):
        coterie.attention(**arguments)


def test_gradients_of_second_order_are_refused() -> None:
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    out = coterie.attention(q, q, q, "full")
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_centroids_of_routing_take_no_gradient() -> None:
    problem = make_problem("routing(clusters=3,window=5)")
    state = problem.options["state"]
    with pytest.raises(ValueError, match="must not require a gradient"):
        problem.run(state=state._replace(centroids=state.centroids.requires_grad_()))


def _packed(tensor: torch.Tensor | None) -> bytes:
    if tensor is None:
        return b"\n"
    sizes = " ".join(str(size) for size in tensor.shape)
    return sizes.encode() + b"\n" + tensor.detach().contiguous().numpy().tobytes()


@pytest.mark.skipif("COTERIE_CORE_ATTENTION" not in os.environ, reason="needs the C++ program")
@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_results_are_those_of_the_core(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, padded=True).differentiable()
    out = problem.run()
    grad_out = torch.randn_like(out)
    rows = [x for x in (problem.q, problem.k, problem.v) if x is not None]
    gradients = torch.autograd.grad(out, rows, grad_out)
    text = f"{spec}\n{int(causal)} {problem.options['seed']}\n".encode()
    tensors = (*problem.arguments()[:7], grad_out)
    done = subprocess.run(
        [os.environ["COTERIE_CORE_ATTENTION"]],
        input=text + b"".join(_packed(tensor) for tensor in tensors),
        capture_output=True,
        check=True,
    )
    expected = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32)
    found = torch.cat([x.detach().flatten() for x in (out, *gradients)])
    assert torch.equal(found, expected)


def _strided(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers with a stride of 2."""
    return torch.stack([numbers, numbers + 1], 1)[:, 0]


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_lengths_may_have_any_stride(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, padded=True)
    strided = {name: _strided(problem.options[name]) for name in ("q_lengths", "k_lengths")}
    assert not strided["q_lengths"].is_contiguous()
    assert torch.equal(problem.run(**strided), problem.run())
    packed = make_problem(spec, causal, B=1)
    cu = torch.tensor([0, 8, 19], dtype=torch.int32)
    plain, own = ({"cu_seqlens_q": x, "cu_seqlens_k": x} for x in (cu, _strided(cu)))
    assert torch.equal(packed.run(**own), packed.run(**plain))
