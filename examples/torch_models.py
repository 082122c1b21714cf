# SPDX-License-Identifier: MIT
"""Coterie in models of plain torch: a TransformerEncoder, and one with attention of its own."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import coterie
import coterie.nn

torch.manual_seed(0)
SPEC = "i-clustered(clusters=8,topk=64)"  # topk >= length: nothing is approximated
x = torch.randn(2, 64, 32)

# torch.nn.TransformerEncoder: its layers get the same weights in coterie.nn.Attention.
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
with torch.no_grad():
    before = encoder(x)
    coterie.nn.swap_attention(encoder, SPEC)
    difference = (encoder(x) - before).abs().max().item()
print(f"TransformerEncoder: difference from torch's attention {difference:.1e}")
assert difference < 1e-4


class Attention(nn.Module):
    """A module that calls torch's attention, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 64, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


model = nn.Sequential(Attention(), nn.GELU(), Attention())
with torch.no_grad():
    before = model(x)
    coterie.apply(model, SPEC)
    difference = (model(x) - before).abs().max().item()
print(f"a model that calls torch's attention: difference {difference:.1e}")
assert difference < 1e-4
