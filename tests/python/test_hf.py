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
    with pytest.raises(ValueError, match="supports padding only"):
        model(tokens, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("spec", ["lsh", "cast(clusters=2,size=3)", "full(positions=rotary)"])
def test_specs_that_need_more_than_a_model_gives_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="spec: "):
        coterie.hf.use(_bert(), spec)


def test_a_decoder_with_routing_heads_trains() -> None:
    model, tokens = _llama().train(), _tokens()
    coterie.hf.use(model, "2*local(window=6)+2*routing(clusters=3,window=5)")
    loss = model(tokens, labels=tokens).loss + coterie.nn.commitment_loss(model)
    loss.backward()
    layer = coterie.hf.attention_layers(model)["model.layers.1.self_attn"]
    before = layer.coterie.group_1.centroids.clone()
    coterie.nn.update_centroids(model)
    assert not torch.equal(layer.coterie.group_1.centroids, before)
    assert layer.coterie.group_1.logit_scale.grad.abs().max() > 0


def _bart(encoder_heads: int = 4) -> transformers.BartModel:
    config = transformers.BartConfig(
        vocab_size=97,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=encoder_heads,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=64,
    )
    return transformers.BartModel._from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("decoder_length", [9, 20])  # 20: as many queries as encoder keys
@torch.no_grad()
def test_an_encoder_decoder_with_full_attention_gives_eager_results(
    side: str, decoder_length: int
) -> None:
    model, tokens, mask = _bart(), _tokens(), _mask(side)
    decoder = {"decoder_input_ids": torch.randint(3, 97, (3, decoder_length)), "use_cache": False}
    eager = model(tokens, attention_mask=mask, **decoder)
    coterie.hf.use(model, "full")
    ours = model(tokens, attention_mask=mask, **decoder)
    torch.testing.assert_close(ours.last_hidden_state, eager.last_hidden_state)
    torch.testing.assert_close(
        ours.encoder_last_hidden_state[mask.bool()], eager.encoder_last_hidden_state[mask.bool()]
    )


@torch.no_grad()
def test_encoder_and_decoder_have_layers_of_their_own() -> None:
    """Both have the same layer_idx, but their own causality, heads, centroids and seeds."""
    model, tokens = _bart(encoder_heads=8), _tokens()
    decoder = {"decoder_input_ids": tokens[:, :9], "use_cache": False}
    eager = model(tokens, **decoder)
    coterie.hf.use(model, "local(window=3)", layers=["decoder", 0])
    layers = coterie.hf.attention_layers(model)
    own = {name: getattr(layer, "coterie", None) for name, layer in layers.items()}
    specs = {name: groups and (groups.spec, groups.causal) for name, groups in own.items()}
    assert specs == {
        "encoder.layers.0.self_attn": ("local(window=3)", False),
        "encoder.layers.1.self_attn": None,
        "decoder.layers.0.self_attn": ("local(window=3)", True),
        "decoder.layers.1.self_attn": ("local(window=3)", True),
    }
    assert not torch.allclose(model(tokens, **decoder)[0], eager[0])
    wide = "i-clustered(clusters=5,topk=32)"  # all keys: nothing is approximated
    coterie.hf.use(model, wide, layers=["encoder"])
    coterie.hf.use(model, "local(window=64)", layers=["decoder"])
    ours = model(tokens, **decoder)
    torch.testing.assert_close(ours.last_hidden_state, eager.last_hidden_state)
    with pytest.raises(ValueError, match="layers: expected some of"):
        coterie.hf.use(model, "full", layers=["encode"])
    coterie.hf.use(model, "routing(clusters=3,window=4)", layers=[0])
    for part, heads in (("encoder", 8), ("decoder", 4)):
        group = layers[f"{part}.layers.0.self_attn"].coterie.group_0
        assert group.centroids.shape[0] == heads


@pytest.mark.parametrize("spec", STRICT)
@pytest.mark.parametrize("side", ["left", "none"])
@torch.no_grad()
def test_a_static_cache_gives_the_logits_of_a_growing_one(spec: str, side: str) -> None:
    """Prefill, a second chunk of several tokens, then one at a time; 12 slots stay empty."""
    model, tokens = _llama(), _tokens()
    coterie.hf.use(model, spec)
    mask = None if side == "none" else _mask(side)
    caches = [
        transformers.StaticCache(config=model.config, max_cache_len=32),
        transformers.DynamicCache(config=model.config),
    ]
    logits = []
    for cache in caches:
        parts = []
        for begin, end in ((0, 12), (12, 18), (18, 19), (19, 20)):
            own = None if mask is None else mask[:, :end]
            parts.append(
                model(tokens[:, begin:end], attention_mask=own, past_key_values=cache).logits
            )
        logits.append(torch.cat(parts, 1))
    counted = torch.ones(3, 20, dtype=torch.bool) if mask is None else mask.bool()
    assert torch.equal(logits[0][counted], logits[1][counted])
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits[0][counted], whole[counted])


@torch.no_grad()
def test_a_static_cache_gives_eager_logits() -> None:
    model, tokens = _llama(), _tokens()
    settings = {"max_new_tokens": 5, "do_sample": False, "output_logits": True}
    settings |= {"return_dict_in_generate": True, "disable_compile": True}
    eager = model.generate(tokens, **settings)
    coterie.hf.use(model, "full")
    ours = model.generate(tokens, cache_implementation="static", **settings)
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits))


def _pair_masks() -> dict[str, Tensor]:
    """The same mask of pairs in every representation of keep and block."""
    keep = torch.rand(3, 1, 20, 20) > 0.4
    keep |= torch.eye(20, dtype=torch.bool)
    masks = {"bool": keep, "int": keep.long(), "uint8": keep.to(torch.uint8)}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for least in (-torch.inf, torch.finfo(dtype).min):
            added = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, least)
            masks[f"{dtype} {least:.0e}"] = added
    return masks


@torch.no_grad()
def test_masks_of_pairs_are_read_by_their_type() -> None:
    model, tokens, masks = _bert(), _tokens(), _pair_masks()
    least = masks["torch.float32 -inf"]
    eager = model(tokens, attention_mask=least).last_hidden_state
    coterie.hf.use(model, "full")
    for name, mask in masks.items():
        ours = model(tokens, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(ours, eager, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("value", [0.5, -3.0, 2, -1])
@torch.no_grad()
def test_a_bias_in_a_mask_of_pairs_is_refused(value: float) -> None:
    model, tokens = _bert(), _tokens()
    coterie.hf.use(model, "full")
    mask = torch.full((3, 1, 20, 20), value)
    with pytest.raises(ValueError, match=f"attention_mask: expected .*; got {value}"):
        model(tokens, attention_mask=mask)
