# SPDX-License-Identifier: MIT
"""Attention by a spec in PyTorch: the function, its error, and a small encoder that is trained."""

import torch
from torch import nn

import coterie
import coterie.nn

torch.manual_seed(0)

# The function: (batch, heads, tokens, head_dim), and a spec that names the attention.
q, k, v = torch.randn(3, 1, 4, 512, 32)
spec = "i-clustered(clusters=32,topk=32)"
out = coterie.attention(q, k, v, spec)
print(f"{spec}: output {tuple(out.shape)}")

# How far it is from full attention on these tensors, and what its clusters look like.
(report,) = coterie.error(q, k, v, spec)
(stats,) = coterie.stats(q, k, v, spec)
print(f"relative error {report.relative.mean():.3f}, mass kept {stats.kept_mass.mean():.3f}")
assert report.relative.max() < 1.0

print(f"for 8192 tokens: {coterie.recommend(8192).spec}")

# torch's encoder layer; half of its heads are full, half are routed by learned centroids. The task:
# predict whether a token has occurred before.
block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
block.self_attn = coterie.nn.Attention(
    32, 4, "2*full+2*routing(clusters=4,window=16,share_qk=true)", causal=True
)
embedding, head = nn.Embedding(24, 32), nn.Linear(32, 1)
model = nn.ModuleList([embedding, block, head])
optimizer = torch.optim.Adam(model.parameters(), 5e-3)
losses = []
for _ in range(60):
    tokens = torch.randint(0, 24, (16, 32))
    seen = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).tril(-1).any(2)
    logits = head(block(embedding(tokens))).squeeze(-1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, seen.float())
    optimizer.zero_grad()
    (loss + coterie.nn.commitment_loss(model)).backward()
    optimizer.step()
    coterie.nn.update_centroids(model)
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.8 * losses[0]
