# SPDX-License-Identifier: MIT
"""Layers of transformers models: how they are chosen, windows, terms of the logits, caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

transformers = pytest.importorskip("transformers")

from families import FAMILIES, N, difference, inputs_of, result  # noqa: E402
from transformers import masking_utils as known  # noqa: E402

import coterie.hf  # noqa: E402

ROUTING = "2*local(window=6)+2*routing(clusters=3,window=5)"


def _build(name: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    family = next(family for family in FAMILIES if family.name == name)
    inputs, counted = inputs_of(family, "left")
    assert counted is not None
    return family.build(), inputs, counted


def _specs(model: Any) -> dict[str, str]:
    layers = coterie.hf.attention_layers(model).items()
    return {name: layer.coterie.spec for name, layer in layers if hasattr(layer, "coterie")}


def test_layers_are_counted_in_each_stack() -> None:
    model, *_ = _build("BART")
    coterie.hf.use(model, "local(window=3)", layers={"encoder": [1], "decoder": None})
    assert list(_specs(model)) == [
        "model.encoder.layers.1.self_attn",
        "model.decoder.layers.0.self_attn",
        "model.decoder.layers.1.self_attn",
    ]
    with pytest.raises(ValueError, match="layers: expected some of"):
        coterie.hf.use(model, "full", layers={"encoder": [2]})
    with pytest.raises(ValueError, match="layers: expected some of"):
        coterie.hf.use(model, "full", layers={"vision": None})


def test_layers_with_windows_are_replaced_only_by_name() -> None:
    model, *_ = _build("ModernBERT")
    coterie.hf.use(model, "clustered(clusters=4)")
    assert list(_specs(model)) == ["layers.0.attn", "layers.2.attn"]
    coterie.hf.use(model, "full", layers=[1])
    assert list(_specs(model)) == ["layers.0.attn", "layers.1.attn", "layers.2.attn"]


def test_a_model_of_windows_only_asks_for_names() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97}
    config = transformers.MistralConfig(**sizes, intermediate_size=48, sliding_window=8)
    model = transformers.MistralModel(config)
    with pytest.raises(ValueError, match="gives a window to each"):
        coterie.hf.use(model, "full")
    coterie.hf.use(model, "full", layers=range(2))
    assert len(_specs(model)) == 2


@pytest.mark.parametrize(("name", "window"), [("ModernBERT", 9), ("Gemma 3", 8)])
@torch.no_grad()
def test_the_windows_of_a_model_are_those_of_local(name: str, window: int) -> None:
    """Half a window is 4 in ModernBERT: 9 keys; Gemma counts all 8."""
    model, inputs, counted = _build(name)
    own = result(model, inputs)
    coterie.hf.use(model, f"local(window={window})", layers=[1, 3] if window == 9 else [0, 2])
    assert difference(own, result(model, inputs), counted) < 2e-5


@torch.no_grad()
def test_windows_next_to_holes_in_the_padding_are_those_of_the_model() -> None:
    model, inputs, _ = _build("ModernBERT")
    inputs["attention_mask"][:, 10:13] = 0
    own = result(model, inputs)
    coterie.hf.use(model, "full")
    counted = inputs["attention_mask"].bool()
    assert difference(own, result(model, inputs), counted) < 2e-5


@pytest.mark.parametrize("name", ["Gemma 2", "GPT-OSS", "T5"])
@torch.no_grad()
def test_soft_caps_sinks_and_biases_work_in_local_and_oracle_top(name: str) -> None:
    """With windows and budgets that cover everything both are full attention."""
    model, inputs, counted = _build(name)
    coterie.hf.use(model, "full", layers=range(2))
    full = result(model, inputs)
    for spec in ("oracle-top(topk=64)", "local(window=129)", "2*full+2*oracle-top(topk=64)"):
        coterie.hf.use(model, spec, layers=range(2))
        assert difference(full, result(model, inputs), counted) < 2e-5
    coterie.hf.use(model, "oracle-top(topk=2)", layers=range(2))
    assert difference(full, result(model, inputs), counted) > 1e-3


@torch.no_grad()
def test_local_with_soft_caps_is_the_window_of_the_model() -> None:
    model, inputs, counted = _build("Gemma 2")
    own = result(model, inputs)
    coterie.hf.use(model, "local(window=8)", layers=[0])
    assert difference(own, result(model, inputs), counted) < 2e-5


@torch.no_grad()
def test_a_cache_that_drops_keys_is_refused_where_they_are_needed() -> None:
    model, inputs, _ = _build("Gemma 3")
    settings = {"max_new_tokens": 4, "do_sample": False}
    own = model.generate(**inputs, **settings)
    coterie.hf.use(model, "local(window=8)", layers=[0, 2])
    assert torch.equal(model.generate(**inputs, **settings), own)
    coterie.hf.use(model, "full", layers=[0])
    with pytest.raises(ValueError, match="past_key_values: the cache keeps the last 8 keys"):
        model.generate(**inputs, **settings)
    cache = transformers.DynamicCache()
    cached = model.generate(**inputs, **settings, past_key_values=cache)
    assert torch.equal(cached, model.generate(**inputs, **settings, use_cache=False))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("side", ["left", "none"])
@pytest.mark.parametrize(("name", "layer"), [("Llama", 0), ("GPT-2", 0), ("Gemma 3", 1)])
@torch.no_grad()
def test_rings_decode_the_tokens_of_the_parallel_pass(
    name: str, layer: int, side: str, beams: int
) -> None:
    """Gemma's layers with windows keep their sliding caches."""
    model, inputs, _ = _build(name)
    if side == "none":
        inputs["attention_mask"][:] = 1
    coterie.hf.use(model, ROUTING)
    settings = {
        "max_new_tokens": 20,
        "do_sample": False,
        "num_beams": beams,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    cache = coterie.hf.RingCache(model)
    ours = model.generate(**inputs, **settings, past_key_values=cache)
    plain = model.generate(**inputs, **settings, use_cache=False)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(
        torch.stack(ours.logits), torch.stack(plain.logits), atol=2e-5, rtol=1e-5
    )
    windows, rings = cache.layers[layer].parts
    assert windows.keys.shape[2] < 6  # of 43 tokens
    assert rings.keys.shape[2] == 3 * 5


@torch.no_grad()
def test_rings_are_refused_where_they_do_not_work() -> None:
    model, inputs, _ = _build("Llama")
    with pytest.raises(ValueError, match="no causal layer has routing heads"):
        coterie.hf.RingCache(model)
    coterie.hf.use(model, ROUTING)
    with torch.enable_grad(), pytest.raises(ValueError, match="no gradients"):
        model(**inputs, past_key_values=coterie.hf.RingCache(model))
    cache = coterie.hf.RingCache(model)
    model(**inputs, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.layers[0].crop(-1)


@torch.no_grad()
def test_a_mask_of_pairs_says_everything() -> None:
    """A prefix that sees itself in a causal model; causal windows refuse later keys."""
    model, inputs, _ = _build("Llama")
    pairs = torch.ones(2, 1, N, N, dtype=torch.bool).tril()
    pairs[..., :5, :5] = True
    tokens = {"input_ids": inputs["input_ids"], "use_cache": False}
    added = torch.zeros(pairs.shape).masked_fill(~pairs, -torch.inf)
    own = result(model, {**tokens, "attention_mask": added})
    coterie.hf.use(model, "full")
    assert difference(own, result(model, {**tokens, "attention_mask": pairs}), None) < 2e-5
    coterie.hf.use(model, "local(window=4)")
    with pytest.raises(ValueError, match="allows later keys"):
        model(**tokens, attention_mask=pairs)


def test_a_model_with_attention_of_its_own_is_refused_by_name() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.MPNetConfig(**sizes, vocab_size=97, intermediate_size=48)
    with pytest.raises(ValueError, match="MPNetModel does not compute its attention by"):
        coterie.hf.use(transformers.MPNetModel(config), "full")


def test_masks_move_between_devices() -> None:
    """As accelerate moves the arguments of layers that are on several devices."""
    mask = coterie.hf.masks.make_mask(2, 4, 4, attention_mask=torch.ones(2, 4, dtype=torch.bool))
    moved = mask.to("meta", non_blocking=True)
    assert moved.valid().device.type == "meta"
    assert mask.valid().device.type == "cpu"


@torch.no_grad()
def test_windows_of_a_model_cost_no_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as local attention, without the model's mask of all pairs."""
    model, inputs, counted = _build("ModernBERT")
    own = result(model, inputs)
    coterie.hf.use(model, "full")
    monkeypatch.delattr("coterie.hf.attention._own")
    assert difference(own, result(model, inputs), counted) < 2e-5


@torch.no_grad()
def test_a_static_cache_works_compiled() -> None:
    """Masks come from generate, outside of the graph; steps share one graph."""
    torch.compiler.reset()
    model, inputs, _ = _build("Llama")
    coterie.hf.use(model, "full")
    settings = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    settings["cache_implementation"] = "static"
    plain = model.generate(**inputs, **settings)
    counter = CompileCounterWithBackend("eager")
    model.forward = torch.compile(model.forward, fullgraph=True, backend=counter)
    assert torch.equal(model.generate(**inputs, **settings), plain)
    assert counter.frame_count <= 3


def test_activation_checkpointing_changes_nothing() -> None:
    model, inputs, counted = _build("ModernBERT")
    coterie.hf.use(model.train(), "i-clustered(clusters=4,topk=4)")

    def gradients() -> list[Tensor]:
        loss = model(**inputs).last_hidden_state[counted].square().sum()
        return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.dim() == 2]))

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(torch.equal, gradients(), plain))


def test_old_versions_of_transformers_are_refused() -> None:
    coterie.hf.check_version("6.0.0.dev0")
    with pytest.raises(ImportError, match=r"needs transformers 5\.17 or newer; this is 5\.2\.0"):
        coterie.hf.check_version("5.2.0")


def test_what_layers_cannot_honour_is_refused() -> None:
    """Attention weights, and paged caches of continuous batching."""
    model, *_ = _build("Llama")
    coterie.hf.use(model, "full", layers="model")
    layer, rows = model.model.layers[0].self_attn, torch.randn(2, 4, N, 8)
    attend = transformers.AttentionInterface()["coterie"]
    for refused in ({"output_attentions": True}, {"cache": object()}, {"head_mask": rows}):
        with pytest.raises(ValueError, match=next(iter(refused))):
            attend(layer, rows, rows[:, :2], rows[:, :2], None, **refused)


@torch.no_grad()
def test_layers_without_a_spec_return_their_weights() -> None:
    """The windows of ModernBERT run as local attention only where nobody asks for weights."""
    model, inputs, _ = _build("ModernBERT")
    own = model(**inputs, output_attentions=True).attentions
    coterie.hf.use(model, "local(window=9)", layers=[1])
    layer, rows = model.layers[3].attn, torch.randn(2, 4, N, 8)
    mask = coterie.hf.masks.make_mask(
        2, N, N, mask_function=known.sliding_window_bidirectional_mask_function(4), local_size=4
    )
    attend = transformers.AttentionInterface()["coterie"]
    settings = {"scaling": 0.3, "sliding_window": 5}
    out, weights = attend(layer, rows, rows, rows, mask, output_attentions=True, **settings)
    assert weights.shape == own[0].shape
    torch.testing.assert_close(attend(layer, rows, rows, rows, mask, **settings)[0], out)


@torch.no_grad()
def test_soft_caps_are_refused_with_rings_too() -> None:
    model, inputs, _ = _build("Gemma 2")
    coterie.hf.use(model, ROUTING)
    cache = coterie.hf.RingCache(model)
    for settings in ({}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match="softcap: "):
            model(**inputs, **settings)
