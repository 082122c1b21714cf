# SPDX-License-Identifier: MIT
"""Coterie in Hugging Face models by name: an encoder with padding, a decoder with a cache."""

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import coterie.hf

torch.manual_seed(0)
sizes = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
tokens = torch.randint(0, 100, (2, 24))
mask = torch.ones_like(tokens)
mask[1, 18:] = 0

# An encoder with random weights (no download). With topk >= length nothing is approximated.
encoder = BertModel(BertConfig(**sizes)).eval()
with torch.no_grad():
    before = encoder(tokens, attention_mask=mask).last_hidden_state
    coterie.hf.use(encoder, "i-clustered(clusters=6,topk=32)")
    after = encoder(tokens, attention_mask=mask).last_hidden_state
difference = (after - before)[mask.bool()].abs().max().item()
print(f"encoder: difference from its own attention {difference:.1e}")
assert difference < 1e-4

# A decoder with strictly causal heads: decoding gives the same with and without a cache.
decoder = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()
coterie.hf.use(decoder, "2*local(window=8)+2*routing(clusters=4,window=8)")
settings = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 8, "do_sample": False}
with torch.no_grad():
    cached = decoder.generate(tokens, use_cache=True, **settings)
    plain = decoder.generate(tokens, use_cache=False, **settings)
    rings = decoder.generate(tokens, past_key_values=coterie.hf.RingCache(decoder), **settings)
print(f"decoder: {cached.shape[1] - 24} tokens, the same with a cache, with rings and without")
assert torch.equal(cached, plain)
assert torch.equal(rings, plain)
