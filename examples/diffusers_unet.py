# SPDX-License-Identifier: MIT
"""Coterie in a UNet of diffusers (random weights, no download)."""

import torch
from diffusers import UNet2DConditionModel

import coterie.diffusers

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=16,
    block_out_channels=(16, 32),
    layers_per_block=1,
    norm_num_groups=4,
    cross_attention_dim=16,
    attention_head_dim=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
).eval()
inputs = {"sample": torch.randn(1, 4, 16, 16), "timestep": 10}
inputs["encoder_hidden_states"] = torch.randn(1, 7, 16)

# Self-attention over the 64 pixels of the lower resolution; cross attention stays torch's.
with torch.no_grad():
    before = unet(**inputs).sample
    for spec in ("i-clustered(clusters=16,topk=64)", "i-clustered(clusters=16,topk=16)"):
        coterie.diffusers.use(unet, spec)
        difference = (unet(**inputs).sample - before).norm() / before.norm()
        print(f"{spec}: relative difference {difference.item():.1e}")
        assert difference < (1e-4 if "topk=64" in spec else 0.1)
