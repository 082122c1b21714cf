# SPDX-License-Identifier: MIT
"""The module: names, head groups, padding, centroids, encoder layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import coterie
import coterie.nn
from coterie.state import group_seed

ROUTING = "2*local(window=6)+2*routing(clusters=3,window=5,share_qk=true)"


def test_parameters_have_the_names_of_the_cpp_module() -> None:
    layer = coterie.nn.Attention(32, 4, f"{ROUTING}", num_kv_heads=2, causal=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == {
        "q.weight": (32, 32),
        "q.bias": (32,),
        "k.weight": (8, 32),
        "k.bias": (8,),
        "v.weight": (16, 32),
        "v.bias": (16,),
        "out.weight": (32, 32),
        "out.bias": (32,),
        "group_1.centroids": (1, 3, 8),
        "group_1.counts": (1, 3),
        "group_1.sums": (1, 3, 8),
        "group_1.logit_scale": (2,),
    }
    cast = coterie.nn.Attention(32, 4, "2*full(positions=relative)+2*cast(clusters=3,size=8)")
    learnt = {name for name in cast.state_dict() if name.startswith("group")}
    assert learnt == {
        "group_0.relative.weight",
        "group_0.relative.bias",
        "group_1.surrogates",
        "group_1.gate.weight",
        "group_1.gate.bias",
    }


def test_group_seeds_are_those_of_the_cpp_modules() -> None:
    # SplitMix64 of 0: the first two outputs of the reference implementation of its authors.
    assert group_seed(0, 0, 0) % 2**64 != group_seed(0, 0, 1) % 2**64
    first = 0xE220A8397B1DCDAF
    assert group_seed(0, 0, 0) % 2**64 == _splitmix(first)


def _splitmix(seed: int) -> int:
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _reference(layer: coterie.nn.Attention, x: Tensor) -> Tensor:
    """Torch's own attention with the projections of a layer of full heads without positions."""
    q, k, v = (f(x).unflatten(2, (4, 8)).transpose(1, 2) for f in (layer.q, layer.k, layer.v))
    out = nn.functional.scaled_dot_product_attention(q, k, v)
    return layer.out(out.transpose(1, 2).flatten(2))


def test_full_attention_equals_torchs() -> None:
    layer = coterie.nn.Attention(32, 4, "full(positions=none)")
    x = torch.randn(2, 13, 32)
    torch.testing.assert_close(layer(x)[0], _reference(layer, x))


def test_rotary_positions_depend_on_distances_only() -> None:
    layer = coterie.nn.Attention(32, 4, "local(window=3)", causal=True)
    x = torch.randn(1, 12, 32)
    whole = layer(x)[0]
    torch.testing.assert_close(layer(x[:, 2:])[0][:, 2:], whole[:, 4:])


def test_relative_positions_depend_on_distances_only() -> None:
    layer = coterie.nn.Attention(32, 4, "local(window=3,positions=relative)", causal=True)
    nn.init.normal_(layer.group_0.relative.bias)
    x = torch.randn(1, 12, 32)
    torch.testing.assert_close(layer(x[:, 2:])[0][:, 2:], layer(x)[0][:, 4:])


@pytest.mark.parametrize(
    "spec", ["full", "i-clustered(clusters=4,topk=3)", "cast(clusters=3,size=6)"]
)
@pytest.mark.parametrize("left", [False, True])
def test_padding_anywhere_has_no_effect(spec: str, left: bool) -> None:
    layer = coterie.nn.Attention(32, 4, spec)
    x = torch.randn(1, 11, 32)
    filler = torch.randn(1, 5, 32)
    padded = torch.cat([filler, x] if left else [x, filler], 1)
    mask = torch.zeros(1, 16, dtype=torch.bool)
    rows = slice(5, 16) if left else slice(0, 11)
    mask[0] = True
    mask[0, rows] = False
    out = layer(padded, key_padding_mask=mask)[0][:, rows]
    torch.testing.assert_close(out, layer(x)[0])


@pytest.mark.parametrize("training", [False, True])
def test_it_replaces_the_attention_of_encoder_layers(training: bool) -> None:
    block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    block.self_attn = coterie.nn.Attention(32, 4, "i-clustered(clusters=3,topk=64)")
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(2, 20, 32)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[1, 14:] = True
    out = encoder(x, src_key_padding_mask=mask)
    torch.testing.assert_close(out[1, :14], encoder(x[1:, :14])[0])


def test_masks_reach_groups_that_honour_them() -> None:
    layer = coterie.nn.Attention(32, 4, "full", causal=False)
    causal = coterie.nn.Attention(32, 4, "full", causal=True)
    causal.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    torch.testing.assert_close(layer(x, attn_mask=mask)[0], causal(x)[0])
    torch.testing.assert_close(causal(x, attn_mask=mask, is_causal=True)[0], causal(x)[0])


def test_tokens_first_inputs_are_transposed() -> None:
    layer = coterie.nn.Attention(32, 4, "full")
    other = coterie.nn.Attention(32, 4, "full", batch_first=False)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(other(x.transpose(0, 1))[0].transpose(0, 1), layer(x)[0])


REFUSALS = [
    ({"key": torch.zeros(1, 5, 32)}, "key: expected the tensor of query"),
    ({"need_weights": True}, "need_weights: expected False"),
    ({"is_causal": True}, "is_causal"),
    ({"attn_mask": torch.zeros(5, 5).bool()}, "attn_mask: expected None"),
    ({"key_padding_mask": torch.zeros(1, 4).bool()}, "key_padding_mask: expected shape"),
    ({"key_padding_mask": torch.full((1, 5), -1.0)}, "key_padding_mask: expected a bool mask"),
    ({"lengths": torch.tensor([1, 2])}, "lengths: expected shape"),
]


@pytest.mark.parametrize(("arguments", "match"), REFUSALS)
def test_what_cannot_be_honoured_is_refused(arguments: dict, match: str) -> None:
    layer = coterie.nn.Attention(32, 4, "i-clustered(clusters=2,topk=2)")
    with pytest.raises(ValueError, match=match):
        layer(torch.zeros(1, 5, 32), **arguments)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"embed_dim": 30}, "embed_dim: expected a multiple of 4"),
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor"),
        ({"dropout": 0.1}, "dropout: expected 0.0"),
        ({"spec": "1*full+3*local(window=2)", "num_kv_heads": 2}, "spec: expected groups whose"),
        ({"spec": "routing(clusters=2,window=2,positions=relative)"}, "rotary.none"),
    ],
)
def test_wrong_options_are_named(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        coterie.nn.Attention(**{"embed_dim": 32, "num_heads": 4, **options})


def test_centroids_move_towards_the_tokens() -> None:
    layer = coterie.nn.Attention(
        32, 4, ROUTING.replace("window=5", "window=5,decay=0.5"), causal=True
    )
    x = torch.randn(4, 30, 32)
    layer(x)
    coterie.nn.initialise_centroids(layer)
    losses = []
    for _ in range(4):
        layer(x)
        losses.append(coterie.nn.commitment_loss(layer).item())
        coterie.nn.update_centroids(layer)
    assert losses[-1] < losses[0]


def test_centroids_stay_in_evaluation_and_without_update() -> None:
    layer = coterie.nn.Attention(32, 4, ROUTING, causal=True)
    before = copy.deepcopy(dict(layer.named_buffers()))
    layer(torch.randn(2, 20, 32))
    layer.eval()(torch.randn(2, 20, 32))
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name])
    assert copy.deepcopy(layer).group_1.commitment is None


def test_checkpoints_survive_safetensors(tmp_path: object) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    layer = coterie.nn.Attention(32, 4, ROUTING, causal=True, seed=1)
    safetensors.save_file(layer.state_dict(), f"{tmp_path}/layer.safetensors")
    other = coterie.nn.Attention(32, 4, ROUTING, causal=True, seed=2)
    other.load_state_dict(safetensors.load_file(f"{tmp_path}/layer.safetensors"))
    x = torch.randn(2, 20, 32)
    assert torch.equal(layer(x)[0], other(x)[0])
