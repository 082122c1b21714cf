# SPDX-License-Identifier: MIT
r"""Milliseconds per generated token of `coterie generate` and of `transformers`.

    python python/bench/generate.py --program build/release/bin/coterie > generate.jsonl

The model is that of `coterie train --task bytes`, untrained; `transformers` runs a GPT-NeoX of the
same size. Both take the likeliest token and have one text at a time. One JSON line per attention
and length of the prompt. The time per token is that of the tokens after the prompt: a mean for
coterie, which includes what is initialised with the first ones, a median for transformers.
experiments/generation.py draws experiments/logs/generate.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, StoppingCriteria, StoppingCriteriaList

ATTENTIONS = {
    "full": "full",
    "local": "local(window=256)",
    "routing": "4*local(window=256)+4*routing(clusters=16,window=256)",
}


class Clock(StoppingCriteria):
    """Notes the time of every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        input_ids.sum().item()  # waits for the device
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def transformers_lines(options: argparse.Namespace) -> None:
    """Prints a line for each prompt."""
    config = GPTNeoXConfig(
        vocab_size=256, hidden_size=options.width, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, intermediate_size=4 * options.width,
        max_position_embeddings=max(options.contexts) + options.tokens, use_parallel_residual=False,
        attn_implementation="sdpa", bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0,
                              "partial_rotary_factor": 1.0}
    model = GPTNeoXForCausalLM(config).to(options.device, getattr(torch, options.dtype)).eval()
    for context in options.contexts:
        prompt = torch.randint(256, (1, context), device=options.device)
        for tokens in (4, options.tokens):  # the first run initialises libraries
            clock = Clock()
            begin = time.perf_counter()
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens,
                           do_sample=False, stopping_criteria=StoppingCriteriaList([clock]))
        steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
        show("transformers", f"full, {options.dtype}", context, 1e3 * statistics.median(steps),
             clock.times[0] - begin)


def coterie_lines(options: argparse.Namespace) -> None:
    """Prints a line for each attention and prompt."""
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        text = (Path(__file__).read_text() * (max(options.contexts) // 1000))
        for name in options.attention:
            out = f"{folder}/{name}"
            subprocess.run(
                [options.program, "train", "--task", "bytes", "--attention", ATTENTIONS[name],
                 "--device", options.device, "--length", "1024", "--train.batch", "1",
                 "--train.steps", "1", "--train.eval-batches", "1", "--train.final-batches", "1",
                 "--model.dim", str(options.width), "--model.layers", str(options.layers),
                 "--model.heads", str(options.heads), "--out", out],
                check=True, capture_output=True)
            for context in options.contexts:
                prompt.write_text(text[:context])
                found = subprocess.run(
                    [options.program, "generate", out, "--device", options.device, "--prompt-file",
                     prompt, "--tokens", str(options.tokens), "--temperature", "0", "--stats"],
                    check=True, capture_output=True, text=True, errors="replace").stderr
                seconds = re.findall(r": (\d+) tokens in ([\d.]+) s", found)
                (_, reading), (tokens, generating) = seconds
                show("coterie", ATTENTIONS[name], context, 1e3 * float(generating) / int(tokens),
                     float(reading))


def show(program: str, attention: str, context: int, milliseconds: float, prompt: float) -> None:
    """Prints one line."""
    print(json.dumps({"program": program, "attention": attention, "context": context,
                      "ms_per_token": round(milliseconds, 4), "prompt_s": round(prompt, 3)}),
          flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", help="path of coterie; without it, transformers only")
    names = list(ATTENTIONS)
    parser.add_argument("--attention", nargs="*", default=names, choices=names)
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 16384, 131072])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "none"],
                        help="of transformers; none leaves it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Prints the lines."""
    options = _options()
    if options.program:
        coterie_lines(options)
    if options.dtype != "none":
        transformers_lines(options)


if __name__ == "__main__":
    main()
