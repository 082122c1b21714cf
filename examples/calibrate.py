# SPDX-License-Identifier: MIT
"""The attention of a Hugging Face model chosen by measuring it: which heads can be approximated."""

import tempfile

import torch
from transformers import BertConfig, BertModel

import coterie.hf

# An encoder with random weights (no download), with sharper attention than they would give.
torch.manual_seed(0)
config = BertConfig(
    vocab_size=100,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=1024,
)
model = BertModel(config).eval()
for name, parameter in model.named_parameters():
    if "query" in name or "key" in name:
        parameter.data *= 5

# Half of the samples are measured, the choice is verified on the others; times are this machine's.
samples = [torch.randint(0, 100, (1, 1024)) for _ in range(2)]
choice = coterie.calibrate(model, samples, target=0.02)
print(choice)
assert choice.verified <= 0.02

with tempfile.NamedTemporaryFile(suffix=".json") as file, torch.no_grad():
    before = model(samples[1]).last_hidden_state
    choice.save(file.name)
    coterie.hf.use(model, file.name)
    after = model(samples[1]).last_hidden_state
print(f"error of the model's output: {((after - before).norm() / before.norm()).item():.1e}")
assert (after - before).norm() <= 0.021 * before.norm()
