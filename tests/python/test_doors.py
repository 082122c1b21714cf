# SPDX-License-Identifier: MIT
"""Other hosts: torch's names and modules, models that call torch's attention, diffusers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import coterie
import coterie.diffusers
import coterie.nn

B, H, N, D = 2, 4, 20, 8
EXACT = ("full", "i-clustered(clusters=5,topk=64)", "2*full+2*i-clustered(clusters=5,topk=64)")


def _rows(heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, N, D), torch.randn(B, heads, N, D), torch.randn(B, heads, N, D)


def test_attention_takes_the_names_of_torch() -> None:
    q, k, v = _rows(2)
    own = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    ours = coterie.attention(q, k, v, "full", is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, own)
    mask = torch.rand(B, 1, N, N) > 0.4
    mask |= torch.eye(N, dtype=torch.bool)
    added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    own = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    for given in (mask, added):
        ours = coterie.attention(q, k, v, "full", attn_mask=given)
        torch.testing.assert_close(ours, own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True, "is_causal": True}, "is_causal: another name of causal"),
        ({"causal": False, "is_causal": True}, "is_causal: another name of causal"),
        (
            {"mask": torch.ones(N, N, dtype=torch.bool), "attn_mask": torch.zeros(N, N)},
            "attn_mask: another name of mask",
        ),
        ({"attn_mask": torch.full((N, N), 0.5)}, "attn_mask: expected .* 0 and -inf only"),
        ({"enable_gqa": False}, "enable_gqa: False needs as many heads"),
    ],
)
def test_names_of_torch_are_refused_beside_ours(options: dict[str, Any], message: str) -> None:
    q, k, v = _rows(2)
    with pytest.raises(ValueError, match=message):
        coterie.attention(q, k, v, "full", **options)


def test_causal_masks_of_torch_need_as_many_queries_as_keys() -> None:
    q, k, v = _rows()
    with pytest.raises(ValueError, match="is_causal: expected as many queries as keys"):
        coterie.attention(q[:, :, :5], k, v, "full", is_causal=True)


def _helper(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Block(nn.Module):
    """An attention module as people write them."""

    def __init__(self, by_helper: bool = False, heads: int = H) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)
        self.heads, self.by_helper, self.own = heads, by_helper, False

    def forward(self, x: Tensor, mask: Tensor | None = None, queries: int = N) -> Tensor:
        rows = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = rows[0][:, :, -queries:], rows[1], rows[2]
        if self.own:
            out = torch.softmax(q @ k.transpose(2, 3) / D**0.5, -1) @ v
        elif self.by_helper:
            out = _helper(q, k, v, mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(by_helper=True)])

    def forward(self, x: Tensor, mask: Tensor | None = None, queries: int = N) -> Tensor:
        for block in self.blocks:
            x = block(x, mask, queries) if queries == N else block(x, mask, queries)[:, :1] + x
        return x


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, N, H * D)


@pytest.mark.parametrize("spec", EXACT)
@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_apply_replaces_the_attention_of_torch(spec: str, side: str, x: Tensor) -> None:
    model = Model()
    mask = None
    if side != "none":
        keys = torch.arange(N) >= 6 if side == "left" else torch.arange(N) < 14
        mask = torch.stack([keys, torch.ones(N, dtype=torch.bool)])[:, None, None]
    own = model(x, mask)
    coterie.apply(model, spec)
    torch.testing.assert_close(model(x, mask), own)
    coterie.apply(model, "clustered(clusters=2)")
    assert not torch.allclose(model(x, mask), own, atol=1e-3)


@torch.no_grad()
def test_apply_takes_layers_by_name(x: Tensor) -> None:
    model = Model()
    own = model.blocks[0](x), model.blocks[1](x)
    coterie.apply(model, "local(window=2)", layers=["blocks.1"])
    assert torch.equal(model.blocks[0](x), own[0])
    assert not torch.allclose(model.blocks[1](x), own[1], atol=1e-3)
    with pytest.raises(ValueError, match="layers: expected some of"):
        coterie.apply(model, "full", layers=["blocks.2"])
    with pytest.raises(ValueError, match="no module of Linear calls"):
        coterie.apply(nn.Linear(2, 2), "full")


@torch.no_grad()
def test_near_keys_move_with_the_padding(x: Tensor) -> None:
    """Left padding: a query's neighbours stay its neighbours."""
    model, spec = Model(), "i-clustered(clusters=2,topk=1,near=4)"
    coterie.apply(model, spec)
    mask = (torch.arange(N) >= 6).expand(B, N)[:, None, None]
    torch.testing.assert_close(model(x, mask)[:, 6:], model(x[:, 6:]))


@torch.no_grad()
def test_windows_keep_their_places_beside_padding(x: Tensor) -> None:
    model = coterie.apply(Model(), "local(window=3)")
    keys = torch.arange(N) >= 6
    near = (torch.arange(N)[:, None] - torch.arange(N)).abs() <= 1
    expected = Model()
    expected.load_state_dict(model.state_dict())
    pairs = (keys & near).expand(B, 1, N, N)
    ours = model(x, keys.expand(B, N)[:, None, None])
    torch.testing.assert_close(ours[:, 8:], expected(x, pairs)[:, 8:])


@torch.no_grad()
def test_calls_with_other_numbers_of_keys_keep_torchs_attention(x: Tensor) -> None:
    model = Model()
    own = model(x, queries=1)
    coterie.apply(model, "clustered(clusters=2)")
    torch.testing.assert_close(model(x, queries=1), own)


@torch.no_grad()
def test_what_a_replacement_does_not_support_is_refused(x: Tensor) -> None:
    model = coterie.apply(Model(), "clustered(clusters=2)")
    with pytest.raises(ValueError, match=r"attn_mask: .* got a mask of pairs"):
        model(x, torch.ones(N, N, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="attn_mask: expected a bool mask"):
        model(x, torch.full((N, N), 0.5))
    with pytest.raises(ValueError, match="spec: expected mechanisms of queries, keys and values"):
        coterie.apply(model, "routing(clusters=2,window=4)")(x)
    model.blocks[1].own = True
    coterie.apply(model, "full")
    with pytest.raises(RuntimeError, match="Block did not call scaled_dot_product_attention"):
        model(x)
    assert torch.overrides._len_torch_function_stack() == 0  # errors leave no mode behind


def test_a_replaced_model_trains_copies_and_pickles(x: Tensor) -> None:
    model = coterie.apply(Model(), "i-clustered(clusters=3,topk=4)")
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    out = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), out)
    with torch.no_grad():
        twin.blocks[0].out.weight.zero_()
    assert torch.equal(model(x), out)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), out)
    assert isinstance(model.blocks[0], Block)


@torch.no_grad()
def test_a_replaced_model_compiles_in_one_graph(x: Tensor) -> None:
    torch.compiler.reset()
    model = coterie.apply(Model(), "i-clustered(clusters=3,topk=4)")
    own = model(x)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), own)


@torch.no_grad()
def test_rows_without_heads_are_one_head() -> None:
    rows = torch.randn(3, B, N, D)
    own = F.scaled_dot_product_attention(*rows)
    torch.testing.assert_close(coterie.sdpa.Replacement("full")(*rows), own)
    with pytest.raises(ValueError, match="query: expected 3 or 4 dimensions"):
        coterie.sdpa.Replacement("full")(*rows[:, 0])


def _encoder(**settings: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, **settings)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for own in encoder.layers:
        own.self_attn.dropout = 0.0
    return encoder


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spec", EXACT)
def test_swapped_attention_has_the_weights_of_torch(spec: str, training: bool) -> None:
    encoder = _encoder(dropout=0.0).train(training)
    x = torch.randn(B, N, 32)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 15:] = True
    own = encoder(x, src_key_padding_mask=padding)
    assert coterie.nn.swap_attention(encoder, spec) is encoder
    ours = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(ours[~padding], own[~padding])


def test_swapped_attention_may_be_causal_and_without_biases() -> None:
    encoder = _encoder(dropout=0.0, bias=False)
    x, mask = torch.randn(B, N, 32), nn.Transformer.generate_square_subsequent_mask(N)
    own = encoder(x, mask=mask, is_causal=True)
    coterie.nn.swap_attention(encoder, "full", causal=True)
    torch.testing.assert_close(encoder(x, mask=mask, is_causal=True), own)


def test_one_layer_is_swapped_and_cross_attention_stays() -> None:
    own = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(B, N, 32)
    ours = coterie.nn.swap_attention(own, "full")
    torch.testing.assert_close(ours(x)[0], own(x, x, x)[0])
    decoder = nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    coterie.nn.swap_attention(decoder, "full", causal=True)
    assert isinstance(decoder.self_attn, coterie.nn.Attention)
    assert isinstance(decoder.multihead_attn, nn.MultiheadAttention)


@pytest.mark.parametrize(
    ("own", "spec", "message"),
    [
        (nn.MultiheadAttention(32, 4, add_bias_kv=True), "full", "add_bias_kv: not supported"),
        (nn.MultiheadAttention(32, 4, kdim=16), "full", "kdim, vdim: not supported"),
        (nn.MultiheadAttention(32, 4), "lsh", "spec: lsh.* has no keys"),
        (nn.Linear(2, 2), "full", "module: no nn.MultiheadAttention in Linear"),
    ],
)
def test_modules_that_cannot_be_swapped_are_refused(
    own: nn.Module, spec: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        coterie.nn.swap_attention(own, spec)


class StubProcessor:
    """The interface of diffusers' attention processors."""

    def __call__(
        self, attn: Any, hidden: Tensor, context: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        context = hidden if context is None else context
        rows = [attn.linear(y).view(B, -1, H, D).transpose(1, 2) for y in (hidden, context)]
        out = F.scaled_dot_product_attention(rows[0], rows[1], rows[1])
        return out.transpose(1, 2).flatten(2) * scale


class ManualProcessor(StubProcessor):
    def __call__(self, attn: Any, hidden: Tensor) -> Tensor:
        return hidden


class StubAttention(nn.Module):
    def __init__(self, cross: bool, processor: Any) -> None:
        super().__init__()
        self.linear, self.is_cross_attention = nn.Linear(H * D, H * D), cross
        self.set_processor(processor)

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        import inspect

        taken = inspect.signature(self.processor.__call__).parameters
        return self.processor(self, hidden, **{k: v for k, v in kwargs.items() if k in taken})


@torch.no_grad()
def test_processors_of_diffusers_run_with_a_spec(x: Tensor) -> None:
    model = nn.ModuleDict(
        {
            "attn1": StubAttention(False, StubProcessor()),
            "attn2": StubAttention(True, StubProcessor()),
        }
    )
    own = model["attn1"](x, scale=2.0)
    coterie.diffusers.use(model, "i-clustered(clusters=3,topk=64)")
    torch.testing.assert_close(model["attn1"](x, scale=2.0), own)
    coterie.diffusers.use(model, "clustered(clusters=2)", layers=["attn1"])
    assert not torch.allclose(model["attn1"](x, scale=2.0), own, atol=1e-3)
    assert isinstance(model["attn1"].processor, StubProcessor)
    assert type(model["attn2"].processor) is StubProcessor
    with pytest.raises(ValueError, match="layers: expected some of"):
        coterie.diffusers.use(model, "full", layers=["attn2"])
    with pytest.raises(ValueError, match="has no layers with attention processors"):
        coterie.diffusers.use(nn.Linear(2, 2), "full")
    model["attn1"].set_processor(ManualProcessor())
    coterie.diffusers.use(model, "full")
    with pytest.raises(RuntimeError, match="ManualProcessor did not call"):
        model["attn1"](x)


def _unet(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    inputs = {"sample": torch.randn(B, 4, 8, 8), "timestep": 3}
    return model, inputs | {"encoder_hidden_states": torch.randn(B, 5, 16)}


def _flux(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=[4, 4, 8],
    )
    inputs = {"hidden_states": torch.randn(B, 16, 4), "pooled_projections": torch.randn(B, 16)}
    inputs |= {"encoder_hidden_states": torch.randn(B, 6, 16), "timestep": torch.rand(B)}
    return model, inputs | {"img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(6, 3)}


@pytest.mark.parametrize("make", [_unet, _flux])
@torch.no_grad()
def test_models_of_diffusers_run_with_a_spec(make: Any) -> None:
    diffusers = pytest.importorskip("diffusers")
    model, inputs = make(diffusers)
    own = model(**inputs).sample
    coterie.diffusers.use(model, "i-clustered(clusters=5,topk=64)")
    torch.testing.assert_close(model(**inputs).sample, own, atol=2e-5, rtol=1e-4)
    coterie.diffusers.use(model, "clustered(clusters=2)")
    assert (model(**inputs).sample - own).abs().max() > 1e-3
