# SPDX-License-Identifier: MIT
"""Hugging Face models by name: an encoder with padding, a decoder with a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import coterie.hf  # noqa: E402
import coterie.nn  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
STRICT = [
    "full",
    "oracle-top(topk=4)",
    "2*local(window=6)+2*routing(clusters=3,window=5)",
    "2*full+2*routing(clusters=3,window=4,queries_in=2)",
]


def _bert(**changes: object) -> transformers.BertModel:
    config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0, **changes)
    return transformers.BertModel._from_config(config, attn_implementation="eager").eval()


def _llama() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()


def _tokens() -> Tensor:
    return torch.randint(0, 97, (3, 20))


def _mask(side: str) -> Tensor:
    mask = torch.ones(3, 20, dtype=torch.long)
    for row, pad in enumerate((0, 3, 7)):
        if pad:
            mask[row, :pad] = 0 if side == "left" else 1
            mask[row, 20 - pad :] = 0 if side == "right" else 1
    return mask


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_an_encoder_with_a_full_budget_gives_eager_results(side: str) -> None:
    model, tokens, mask = _bert(), _tokens(), _mask(side)
    eager = model(tokens, attention_mask=mask).last_hidden_state
    coterie.hf.use(model, "i-clustered(clusters=5,topk=32)")
    ours = model(tokens, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()])


@torch.no_grad()
def test_padding_of_an_encoder_changes_nothing() -> None:
    model, tokens = _bert(), _tokens()
    coterie.hf.use(model, "i-clustered(clusters=4,topk=3)")
    mask = _mask("right")
    padded = model(tokens, attention_mask=mask).last_hidden_state
    alone = model(tokens[:1]).last_hidden_state
    torch.testing.assert_close(padded[:1], alone)


@torch.no_grad()
def test_the_spec_may_stand_in_the_config() -> None:
    coterie.hf.register()
    model, tokens = _bert(), _tokens()
    eager = model(tokens).last_hidden_state
    model.config.coterie_spec = "i-clustered(clusters=5,topk=32)"
    model.set_attn_implementation("coterie")
    torch.testing.assert_close(model(tokens).last_hidden_state, eager)
    del model.config.coterie_spec
    with pytest.raises(ValueError, match="expected a spec"):
        model(tokens)


@torch.no_grad()
def test_layers_are_chosen_by_index() -> None:
    model, tokens = _bert(), _tokens()
    eager = model(tokens, output_hidden_states=True).hidden_states
    coterie.hf.use(model, "clustered(clusters=2)", layers=[1])
    ours = model(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(ours[1], eager[1])
    assert not torch.allclose(ours[2], eager[2])
    with pytest.raises(ValueError, match="layers: expected some of"):
        coterie.hf.use(model, "full", layers=[2])


@torch.no_grad()
def test_a_decoder_with_full_attention_gives_eager_logits() -> None:
    model, tokens = _llama(), _tokens()
    for side in ("left", "right"):
        mask = _mask(side)
        model.set_attn_implementation("eager")
        eager = model(tokens, attention_mask=mask).logits
        coterie.hf.use(model, "full")
        ours = model(tokens, attention_mask=mask).logits
        torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()])


@pytest.mark.parametrize("spec", STRICT)
@torch.no_grad()
def test_decoding_with_a_cache_gives_the_logits_of_one_pass(spec: str) -> None:
    model, tokens, mask = _llama(), _tokens(), _mask("left")
    coterie.hf.use(model, spec)
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    cached = model.generate(tokens, use_cache=True, **settings)
    plain = model.generate(tokens, use_cache=False, **settings)
    assert torch.equal(cached.sequences, plain.sequences)
    whole = torch.cat([mask, torch.ones(3, 6, dtype=torch.long)], 1)
    positions = (whole.cumsum(1) - 1).clamp_min(0)
    parallel = model(cached.sequences, attention_mask=whole, position_ids=positions).logits
    torch.testing.assert_close(torch.stack(cached.logits, 1), parallel[:, 19:-1])


@torch.no_grad()
def test_a_leaking_spec_cannot_decode() -> None:
    model = _llama()
    coterie.hf.use(model, "i-clustered(clusters=3,topk=4,causal=reference)")
    model(_tokens())
    with pytest.raises(ValueError, match="strictly causal"):
        model.generate(_tokens(), max_new_tokens=2, do_sample=False)


@torch.no_grad()
def test_packed_rows_are_honoured_or_refused() -> None:
    model, tokens = _llama(), _tokens()[:1]
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    coterie.hf.use(model, "full")
    packed = model(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, :12], model(tokens[:, :12]).logits)
    torch.testing.assert_close(packed[:, 12:], model(tokens[:, 12:]).logits)
    coterie.hf.use(model, "routing(clusters=3,window=4)")
    with pytest.raises(ValueError, match="attention_mask: expected padding only"):
        model(tokens, position_ids=positions, use_cache=False)


def test_attention_dropout_is_refused() -> None:
    model = _bert().train()
    for layer in coterie.hf.attention_layers(model).values():
        layer.dropout.p = 0.1
    coterie.hf.use(model, "full")
    with pytest.raises(ValueError, match="dropout: expected"):
        model(_tokens())


@pytest.mark.parametrize("spec", ["lsh", "cast(clusters=2,size=3)", "full(positions=rotary)"])
def test_specs_that_need_more_than_a_model_gives_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="spec: expected"):
        coterie.hf.use(_bert(), spec)


def test_a_decoder_with_routing_heads_trains() -> None:
    model, tokens = _llama().train(), _tokens()
    coterie.hf.use(model, "2*local(window=6)+2*routing(clusters=3,window=5)")
    loss = model(tokens, labels=tokens).loss + coterie.nn.commitment_loss(model)
    loss.backward()
    layer = coterie.hf.attention_layers(model)[1]
    before = layer.coterie.group_1.centroids.clone()
    coterie.nn.update_centroids(model)
    assert not torch.equal(layer.coterie.group_1.centroids, before)
    assert layer.coterie.group_1.logit_scale.grad.abs().max() > 0
