# SPDX-License-Identifier: MIT
"""Attention dropout: the generator, statistics, derivatives and every door."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import IDS, SPECS, make_problem
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import coterie
import coterie.nn

B, H, N = 4, 4, 64


def _rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Values are unit vectors: outputs are the weights (B, H, N, N)."""
    torch.manual_seed(seed)
    return torch.randn(B, H, N, 16), torch.randn(B, H, N, 16), torch.eye(N).expand(B, H, N, N)


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_the_seed_of_torch_says_what_is_dropped(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, padded=True)
    torch.manual_seed(1)
    first, second = problem.run(dropout_p=0.5), problem.run(dropout_p=0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(problem.run(dropout_p=0.5), first)
    state = torch.random.get_rng_state()
    assert torch.equal(problem.run(dropout_p=0.0), problem.run())
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_full_attention_has_the_statistics_of_torch(p: float) -> None:
    q, k, v = _rows()
    whole = F.scaled_dot_product_attention(q, k, v)
    for attend in (
        lambda: coterie.attention(q, k, v, "full", dropout_p=p),
        lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=p),
    ):
        total = torch.zeros_like(whole)
        for _ in range(50):
            out = attend()
            kept = out != 0
            torch.testing.assert_close(out[kept], (whole / (1 - p))[kept])
            deviation = (p * (1 - p) / kept.numel()) ** 0.5
            assert abs(kept.double().mean().item() - (1 - p)) < 5 * deviation
            total += out / 50
        spread = whole * (p / (1 - p) / 50) ** 0.5
        assert ((total - whole).abs() < 7 * spread).all()


def test_groups_of_heads_drop_other_weights() -> None:
    q, k, v = _rows()
    out = coterie.attention(q, k, v, "2*full+2*full", dropout_p=0.5)
    assert not torch.equal(out[:, :2] != 0, out[:, 2:] != 0)


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_derivatives_are_those_of_the_dropped_weights(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, B=1, H=2, Hkv=1, N=7, D=4, dtype=torch.float64)
    problem = problem.differentiable()

    def attend(*_: Tensor) -> Tensor:
        torch.manual_seed(2)
        return problem.run(dropout_p=0.3)

    rows = [x for x in (problem.q, problem.k, problem.v) if x is not None]
    assert torch.autograd.gradcheck(attend, rows)


@pytest.mark.parametrize("spec", ["full", "i-clustered(clusters=3,topk=4)"])
def test_compiled_and_checkpointed_calls_repeat_it(spec: str) -> None:
    problem = make_problem(spec).differentiable()
    rows = (problem.q, problem.k, problem.v)

    def loss() -> Tensor:
        out = problem.run(dropout_p=0.4)
        return (out * torch.arange(out.numel()).view_as(out)).sum()

    torch.manual_seed(3)
    eager = loss()
    wanted = torch.autograd.grad(eager, rows)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for again in (compiled, lambda: checkpoint(loss, use_reentrant=False)):
        torch.manual_seed(3)
        found = again()
        assert torch.equal(found, eager)
        for one, other in zip(torch.autograd.grad(found, rows), wanted, strict=True):
            assert torch.equal(one, other)


def test_layers_drop_in_training_only() -> None:
    torch.manual_seed(0)
    layer = coterie.nn.Attention(32, 4, "2*full+2*clustered(clusters=3)", dropout=0.5)
    plain = coterie.nn.Attention(32, 4, "2*full+2*clustered(clusters=3)")
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 12, 32)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])


def test_swapped_and_replaced_attention_keep_their_dropout() -> None:
    own = nn.MultiheadAttention(32, 4, dropout=0.3, batch_first=True)
    assert coterie.nn.swap_attention(own, "full").dropout == 0.3
    q, k, v = _rows()
    out = coterie.sdpa.Replacement("full")(q, k, v, dropout_p=0.5)
    assert 0.4 < (out == 0).double().mean() < 0.6
    with pytest.raises(ValueError, match="dropout_p: expected a probability"):
        coterie.sdpa.Replacement("full")(q, k, v, dropout_p=1.5)


def _bert() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    assert config.attention_probs_dropout_prob == 0.1  # its default
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize("spec", ["full", "i-clustered(clusters=3,topk=4)", "local(window=6)"])
def test_bert_with_its_default_config_trains(spec: str) -> None:
    import coterie.hf

    tokens = torch.randint(0, 97, (4, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 13:] = 0

    def losses() -> list[float]:
        model = coterie.hf.use(_bert(), spec).train()
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
        found = []
        for _ in range(12):
            loss = model(tokens, attention_mask=mask, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    first = losses()
    assert first == losses()  # torch.manual_seed repeats the run
    assert first[-1] < first[0] - 0.5


def test_a_model_drops_weights_in_training_only() -> None:
    import coterie.hf

    model = _bert()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    own = model.eval()(tokens).logits
    coterie.hf.use(model, "full")
    torch.testing.assert_close(model(tokens).logits, own)
    for layer in coterie.hf.attention_layers(model).values():
        layer.dropout.p = 0.5
    torch.testing.assert_close(model(tokens).logits, own)
    model.train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
