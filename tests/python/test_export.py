# SPDX-License-Identifier: MIT
"""Runs of the program coterie as folders of transformers: equal logits, equal tokens."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers")
PROGRAM = os.environ.get("COTERIE_PROGRAM", "")
LOGITS = os.environ.get("COTERIE_MODEL_LOGITS", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="needs the C++ program with training")

LENGTH = 24
SAMPLE = "It's a naïve café;  日本語 😀 don't\n\n\tend \n"
VALID = (SAMPLE * 20).encode()[: 20 * LENGTH + 1]
CASES = {
    "plain": (),
    "shared-keys": ("--model.kv-heads", 2, "--model.bias=false", "--model.tied"),
    "groups": ("--attention", "2*full+2*full", "--model.ffn", 40, "--model.layers", 3),
}


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)


def _train(folder: Path, *options: object) -> Path:
    (folder / "text").mkdir()
    (folder / "text" / "train.txt").write_text(SAMPLE * 400)
    (folder / "text" / "valid.txt").write_bytes(VALID)
    sizes = ("--model.dim", 32, "--model.heads", 4, "--length", LENGTH, "--train.steps", 20)
    data = ("--data", folder / "text", "--train.batch", 4, "--threads", 1)
    done = _run("train", "--out", folder / "run", *sizes, *data, *options)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def _export(run: Path, out: Path, *options: object) -> transformers.PreTrainedModel:
    done = _run("export", run, "--to", "huggingface", "--out", out, *options)
    assert done.returncode == 0, done.stderr
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    assert isinstance(model, transformers.GPTNeoXForCausalLM)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def _best(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "best").read_text().strip()


def _program_logits(checkpoint: Path, tokens: Tensor) -> Tensor:
    command = [LOGITS, str(checkpoint), "0", *map(str, tokens.shape)]
    done = subprocess.run(command, input=tokens.numpy().tobytes(), capture_output=True)
    assert done.returncode == 0, done.stderr
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(*tokens.shape, -1)


@pytest.mark.parametrize("task", ["bytes", "tokens"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_the_program(task: str, case: str, tmp_path: Path) -> None:
    options = ("--text.vocabulary", 300) if task == "tokens" else ()
    run = _train(tmp_path, "--task", task, *options, *CASES[case])
    model = _export(run, tmp_path / "hf")
    tokens = torch.randint(0, model.config.vocab_size, (2, LENGTH))
    expected = _program_logits(_best(run), tokens)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("task", ["bytes", "tokens"])
def test_the_tokenizer_comes_with_the_model(task: str, tmp_path: Path) -> None:
    options = ("--text.vocabulary", 300) if task == "tokens" else ()
    model = _export(_train(tmp_path, "--task", task, *options), tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer(SAMPLE)["input_ids"]
    assert tokenizer.decode(ids) == SAMPLE
    assert len(tokenizer) == model.config.vocab_size
    if task == "bytes":
        assert ids == list(SAMPLE.encode())
    else:
        assert len(ids) < len(SAMPLE.encode()) / 2
    out = model.generate(torch.tensor([ids[:5]]), max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 8)


@torch.no_grad()
def test_another_attention_is_refused_or_exported_as_full(tmp_path: Path) -> None:
    run = _train(tmp_path, "--task", "bytes", "--attention", "local(window=8)")
    done = _run("export", run, "--to", "huggingface", "--out", tmp_path / "hf")
    assert done.returncode == 2
    assert 'layer 0 has "local(window=8)"' in done.stderr and "--attention full" in done.stderr
    assert not (tmp_path / "hf").exists()

    model = _export(run, tmp_path / "hf", "--attention", "full")
    done = _run("eval", run, "--json", "--attention", "full")
    expected = json.loads(done.stdout.splitlines()[1])["loss"]
    rows = torch.tensor(list(VALID))
    logits = model(rows[:-1].view(-1, LENGTH)).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, rows[1:]).item()
    assert loss == pytest.approx(expected, rel=1e-5)
