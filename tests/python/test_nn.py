# SPDX-License-Identifier: MIT
"""The module: names, head groups, padding, centroids, encoder layers."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import coterie
import coterie.nn
from coterie.library import group_seed

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
    # tests/core/layer_test.cc has the same.
    assert group_seed(7, 3, 1) == 0x3B43325C33913DC4
    assert group_seed(12345678901234567890, 7, 3) == 0x39F88C7ECC7FD3B3
    assert group_seed(0, 0, 0) == 0xA706DD2F4D197E6F - 2**64
    assert group_seed(-1, 0, 0) == group_seed(2**64 - 1, 0, 0)


def _reference(layer: coterie.nn.Attention, x: Tensor) -> Tensor:
    """Torch's attention with the projections of a layer of full heads without positions."""
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
    ({"key": torch.zeros(1, 5, 32)}, "key: only self-attention is supported"),
    ({"need_weights": True}, "need_weights: attention weights are not kept"),
    ({"is_causal": True}, "is_causal"),
    ({"attn_mask": torch.zeros(5, 5).bool()}, "attn_mask: i-clustered does not support masks"),
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
        ({"num_kv_heads": 3}, "multiple of the number of key.value heads; got 4 and 3"),
        ({"dropout": 1.0}, "dropout: expected a probability from 0 to below 1; got 1.0"),
        ({"spec": "1*full+3*local(window=2)", "num_kv_heads": 2}, "got a group of 1"),
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


def test_the_modules_of_the_package_need_no_import_of_their_own() -> None:
    program = "import coterie; print(coterie.nn.Attention.__name__, coterie.hf.use.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "Attention use\n", done.stderr


@pytest.mark.parametrize("spec", ["i-clustered(clusters=3,topk=4)", "lsh(rounds=2,chunk=4)"])
def test_clusterings_depend_on_the_layer(spec: str) -> None:
    x = torch.randn(2, 40, 32)
    layers = [coterie.nn.Attention(32, 4, spec, layer=layer) for layer in (None, 0, 1)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    alone, first, second = (layer(x)[0] for layer in layers)
    assert torch.equal(alone, first)
    assert not torch.equal(first, second)


def test_initial_centroids_depend_on_the_layer_as_in_the_cpp_models() -> None:
    spec = "routing(clusters=3,window=4)"
    own = coterie.nn.Attention(32, 4, spec, seed=5, layer=2).group_0.centroids
    same = coterie.nn.Attention(32, 4, spec, seed=group_seed(5, 2, 0)).group_0.centroids
    assert torch.equal(own, same)


MOVING = [
    "routing(clusters=3,window=8,decay=0.8,commitment=0.3)",
    "routing(clusters=3,window=8,decay=0.8,commitment=0.3,share_qk=true)",
]


@pytest.mark.parametrize("spec", MOVING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_micro_batches_move_centroids_as_one_batch(
    spec: str, dtype: torch.dtype, causal: bool
) -> None:
    """All passes since the last update count once; sums differ in their order."""
    whole = coterie.nn.Attention(32, 4, spec, causal=causal).to(dtype)
    parts = copy.deepcopy(whole)
    x, lengths = torch.randn(6, 20, 32, dtype=dtype), torch.tensor([20, 3, 11, 0, 20, 7])
    for _ in range(2):
        whole(x, lengths=lengths)
        coterie.nn.update_centroids(whole)
        for rows in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6)):
            parts(x[rows], lengths=lengths[rows])
        coterie.nn.update_centroids(parts)
    # A sum of n members has n roundings, and rows differ by the sums in their projections.
    tolerance = 8 * 120 * torch.finfo(dtype).eps
    for name, buffer in whole.named_buffers():
        found = dict(parts.named_buffers())[name]
        torch.testing.assert_close(found, buffer, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", MOVING)
def test_an_update_is_that_of_the_core(spec: str) -> None:
    """The moving average of a pass, by queries and then by keys."""
    layer = coterie.nn.Attention(32, 4, spec, causal=True)
    layer(torch.randn(3, 20, 32))
    group = layer.group_0
    state = [buffer.clone() for buffer in group.buffers_of_centroids()]
    for tokens in group._tokens:
        statistics = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in state[1:]]
        torch.ops.coterie.add_centroid_statistics(*statistics, *tokens, None)
        torch.ops.coterie.move_centroids(*state, *statistics, 0.8)
    coterie.nn.update_centroids(layer)
    for expected, found in zip(state, group.buffers_of_centroids(), strict=True):
        assert torch.equal(found, expected)


def test_updates_count_a_pass_once() -> None:
    """A second update ignores earlier passes, as does an update after an initialisation."""
    layer = coterie.nn.Attention(32, 4, MOVING[0], causal=True)
    layer(torch.randn(2, 20, 32))
    coterie.nn.update_centroids(layer)
    before = copy.deepcopy(dict(layer.named_buffers()))
    coterie.nn.update_centroids(layer)
    layer(torch.randn(2, 20, 32))
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name])
    coterie.nn.initialise_centroids(layer)
    before = copy.deepcopy(dict(layer.named_buffers()))
    coterie.nn.update_centroids(layer)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name])


class _Wrapped(nn.Module):
    """A projection and a layer, run with or without checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32)
        self.layer = coterie.nn.Attention(32, 4, MOVING[0], causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.project(x))[0]


def _step(model: _Wrapped, x: Tensor, **checkpointing: bool) -> dict[str, Tensor]:
    """Gradients and buffers after two micro-batches and an update."""
    for part in x.chunk(2):
        out = checkpoint(model, part, **checkpointing) if checkpointing else model(part)
        (out.square().mean() + coterie.nn.commitment_loss(model)).backward()
    coterie.nn.update_centroids(model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {**gradients, **dict(model.named_buffers())}


def test_checkpointing_keeps_the_commitment_loss_and_counts_passes_once() -> None:
    model, x = _Wrapped(), torch.randn(4, 20, 32, requires_grad=True)
    other = copy.deepcopy(model)
    expected = _step(model, x)
    found = _step(other, x, use_reentrant=False)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_reentrant_checkpointing_is_refused_where_it_drops_the_commitment_loss() -> None:
    model, x = _Wrapped(), torch.randn(4, 20, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        _step(model, x, use_reentrant=True)
    with torch.no_grad():
        model(x)
        assert coterie.nn.commitment_loss(model) > 0


def test_reentrant_checkpointing_counts_passes_once() -> None:
    model, x = _Wrapped(), torch.randn(4, 20, 32, requires_grad=True)
    other = copy.deepcopy(model)
    for own, checkpointing in ((model, False), (other, True)):
        out = checkpoint(own, x, use_reentrant=True) if checkpointing else own(x)
        out.sum().backward()
        coterie.nn.update_centroids(own)
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(other.named_buffers())[name], buffer), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_the_commitment_loss_is_scaled_before_it_is_rounded(
    dtype: torch.dtype,
) -> None:
    """With a weight of 1 it would be subnormal in float16, and much of it would be 0."""
    x = torch.randn(4, 8, 1024, 64).to(dtype)
    centroids = torch.randn(8, 4, 64)
    labels = torch.randint(0, 4, (4, 8, 1024), dtype=torch.int32)
    scale = 2.0**18
    wide, half = x.float().requires_grad_(), x.clone().requires_grad_()
    for rows in (wide, half):
        loss = torch.ops.coterie.commitment_loss(rows, centroids, labels, None, None)
        (loss * scale).sum().backward()
    # Rounded once to nearest: half the distance to the next number, also if subnormal.
    info = torch.finfo(dtype)
    bound = (wide.grad.abs() * info.eps / 2).clamp_min(info.smallest_normal * info.eps / 2)
    assert ((half.grad.float() - wide.grad).abs() <= bound).all()
    assert wide.grad.abs().max() / scale < 2 ** -14  # the unscaled one is subnormal in float16
