# SPDX-License-Identifier: MIT
"""Tiny random models of transformers by family, with inputs; nothing is downloaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor

B, N, VOCABULARY = 2, 24, 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ENDS = {**SIZES, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**ENDS, "num_key_value_heads": 2}
PATCHES = {"image_size": 16, "patch_size": 4}
AUDIO = {
    "conv_dim": (32, 32),
    "conv_stride": (4, 2),
    "conv_kernel": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """How to build a model of a family, and what it takes."""

    name: str
    model: str  # class in transformers
    config: str
    changes: dict[str, Any]
    kind: str  # text, image, audio, decoder, pair or speech
    refuses: str = ""  # what the message says by which it refuses i-clustered

    @property
    def causal(self) -> bool:
        """Whether the stack that gets i-clustered is causal."""
        return self.kind in ("decoder", "causal text")

    @property
    def generates(self) -> bool:
        return self.kind in ("decoder", "pair", "speech")

    def build(self) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.changes)
        for key in vars(config):
            if "dropout" in key and isinstance(getattr(config, key), float):
                setattr(config, key, 0.0)
        own = {"attn_implementation": "eager"}
        model = getattr(transformers, self.model)._from_config(config, **own).eval()
        with torch.no_grad():
            for weight in model.parameters():  # the usual 0.02 makes attention nearly uniform
                if weight.dim() == 2:
                    weight.normal_(0, 1.5 / weight.shape[1] ** 0.5)
        return model


def refused(term: str) -> str:
    return f"{term}: .* does not support terms of the logits"


def text(name: str, stem: str, **changes: Any) -> Family:
    return Family(name, f"{stem}Model", f"{stem}Config", {**SIZES, **changes}, "text")


def decoder(name: str, stem: str, refuses: str = "", **changes: Any) -> Family:
    model, config = f"{stem}ForCausalLM", f"{stem}Config"
    if stem.endswith("Text"):
        model = f"{stem.removesuffix('Text')}ForCausalLM"
    return Family(name, model, config, {**GROUPED, **changes}, "decoder", refuses)


def image(name: str, stem: str) -> Family:
    return Family(name, f"{stem}Model", f"{stem}Config", {**SIZES, **PATCHES}, "image")


def audio(name: str, stem: str, **changes: Any) -> Family:
    return Family(name, f"{stem}Model", f"{stem}Config", {**SIZES, **AUDIO, **changes}, "audio")


PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
WHISPER = {
    **PAIR,
    "num_mel_bins": 8,
    "max_source_positions": N,
    "max_target_positions": 64,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}

FAMILIES = [
    text("BERT", "Bert"),
    text("RoBERTa", "Roberta"),
    text("XLM-R", "XLMRoberta"),
    text("ELECTRA", "Electra", embedding_size=32),
    text("CamemBERT", "Camembert"),
    text("Data2Vec text", "Data2VecText"),
    text("DistilBERT", "DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    text("ALBERT", "Albert", embedding_size=16),
    text("ESM", "Esm", position_embedding_type="rotary", mask_token_id=4, token_dropout=False),
    text(
        "ModernBERT",
        "ModernBert",
        num_hidden_layers=4,
        local_attention=8,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    text("NomicBERT", "NomicBert"),
    text("EuroBERT", "EuroBert", num_key_value_heads=2),
    image("ViT", "ViT"),
    image("DeiT", "DeiT"),
    image("DINOv2", "Dinov2"),
    image("CLIP vision", "CLIPVision"),
    image("SigLIP vision", "SiglipVision"),
    Family("CLIP text", "CLIPTextModel", "CLIPTextConfig", ENDS, "causal text"),
    text("SigLIP text", "SiglipText"),
    audio("Wav2Vec2", "Wav2Vec2"),
    audio("HuBERT", "Hubert"),
    audio("Data2Vec audio", "Data2VecAudio", num_conv_pos_embeddings=2, conv_pos_kernel_size=3),
    decoder("Llama", "Llama"),
    decoder("Mistral", "Mistral", sliding_window=None),
    decoder("Qwen 2", "Qwen2"),
    decoder("Qwen 3", "Qwen3", head_dim=8),
    decoder("OLMo 2", "Olmo2"),
    decoder("Phi 3", "Phi3", sliding_window=None),
    decoder("Gemma 2", "Gemma2", refused("softcap"), head_dim=8, sliding_window=8),
    decoder(
        "Gemma 3",
        "Gemma3Text",
        head_dim=8,
        sliding_window=8,
        num_hidden_layers=4,
        sliding_window_pattern=2,
    ),
    decoder("Cohere 2", "Cohere2", sliding_window=8, num_hidden_layers=4, sliding_window_pattern=2),
    decoder(
        "GPT-OSS",
        "GptOss",
        refused("s_aux"),
        head_dim=8,
        sliding_window=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    Family("GPT-2", "GPT2LMHeadModel", "GPT2Config", GPT2, "decoder"),
    decoder("GPT-NeoX", "GPTNeoX"),
    Family("BART", "BartForConditionalGeneration", "BartConfig", PAIR, "pair"),
    Family("T5", "T5ForConditionalGeneration", "T5Config", T5, "pair", refused("position_bias")),
    Family("Whisper", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, "speech"),
]


def inputs_of(family: Family, side: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """Inputs of one pass, with padding at a side ("none": without), and which tokens count."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if family.kind == "image":
        return {"pixel_values": draw(B, 3, 16, 16)}, None
    mask = torch.ones(B, N, dtype=torch.long)
    if side == "left" and family.kind != "audio":
        mask[1, :7] = 0
    elif side != "none":
        mask[1, -7:] = 0
    if family.kind == "audio":  # 8 samples become one token
        samples = {"input_values": draw(B, 8 * N), "attention_mask": mask.repeat_interleave(8, 1)}
        return samples, mask.bool()
    tokens = torch.randint(3, VOCABULARY, (B, N), generator=generator)
    if family.kind == "speech":
        return {"input_features": draw(B, 8, 2 * N), "decoder_input_ids": tokens[:, :9]}, None
    inputs = {"input_ids": tokens.where(mask.bool(), 0), "attention_mask": mask}
    if family.kind == "pair":
        inputs["decoder_input_ids"] = tokens[:, :9]
    return inputs, mask.bool()


def result(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a pass computes: the last states, or logits, and those of the encoder."""
    found = model(**inputs)
    names = ("logits", "last_hidden_state", "encoder_last_hidden_state")
    return {name: found[name] for name in names if name in found}


def difference(one: dict[str, Tensor], two: dict[str, Tensor], counted: Tensor | None) -> float:
    """The largest difference of two results in tokens that count."""
    largest = 0.0
    for name, value in one.items():
        gap = (value - two[name]).abs()
        if counted is not None and gap.shape[1] == counted.shape[1]:
            gap = gap[counted]
        largest = max(largest, gap.max().item())
    return largest
