# SPDX-License-Identifier: MIT
"""Saving, loading and training transformers models with specs: Trainer, DDP, LoRA."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import coterie.hf  # noqa: E402
import coterie.nn  # noqa: E402

SPEC = "2*local(window=6)+2*routing(clusters=3,window=5)"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def _llama(spec: str = SPEC) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    return coterie.hf.use(transformers.LlamaForCausalLM(config), spec, seed=3)


def _tokens(rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 97, (rows, 20), generator=generator)


def _centroids(model: Any) -> Tensor:
    found = [x for name, x in model.named_buffers() if name.endswith(".centroids")]
    return torch.stack(found).clone()


@torch.no_grad()
def test_a_saved_model_keeps_specs_and_centroids(tmp_path: Path) -> None:
    model = _llama().eval()
    for name, buffer in model.named_buffers():
        if name.endswith(".centroids"):
            buffer.normal_()
    coterie.hf.use(model, "local(window=4)", layers=[1])
    model.save_pretrained(tmp_path)
    loaded = coterie.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path).eval()
    assert loaded.config.coterie_layers == model.config.coterie_layers
    assert torch.equal(_centroids(loaded), _centroids(model))
    assert torch.equal(loaded(_tokens()).logits, model(_tokens()).logits)
    inner = coterie.hf.from_pretrained(transformers.AutoModel, tmp_path).eval()  # no head
    assert torch.equal(inner(_tokens())[0], model.model(_tokens())[0])
    inner.save_pretrained(tmp_path / "again", max_shard_size="20KB")  # several files
    again = coterie.hf.from_pretrained(transformers.AutoModel, tmp_path / "again").eval()
    assert torch.equal(again(_tokens())[0], inner(_tokens())[0])


@torch.no_grad()
def test_a_saved_model_loads_without_coterie_and_says_what_is_missing(tmp_path: Path) -> None:
    model = _llama("full").eval()
    model.save_pretrained(tmp_path / "full")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval()
    torch.testing.assert_close(plain(_tokens()).logits, model(_tokens()).logits)
    by_name = {"attn_implementation": "coterie"}
    named = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "full", **by_name)
    with pytest.raises(ValueError, match=r"coterie\.hf\.from_pretrained"):
        named(_tokens())
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match=r"path: .* was saved without specs"):
        coterie.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "own")


def _train(model: Any, folder: Path, rows: Tensor, **settings: Any) -> None:
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        **settings,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[coterie.hf.Callback()]
    )
    trainer.train()


def _step_by_hand(model: Any, rows: Tensor) -> None:
    """One step of gradient descent of the loss of all rows, and of the centroids."""
    model.train()
    loss = model(rows, labels=rows).loss + coterie.nn.commitment_loss(model)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    coterie.nn.update_centroids(model)


def _assert_same(one: Any, two: Any) -> None:
    torch.testing.assert_close(_centroids(one), _centroids(two))
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        text = f"{name}: {{}}".format
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=text)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_callback_adds_the_commitment_loss_and_moves_centroids(
    accumulated: int, tmp_path: Path
) -> None:
    """Micro-batches are one batch: Llama's Trainer counts targets, BERT's averages losses."""
    model, rows = _llama(), _tokens(4)
    by_hand = copy.deepcopy(model)
    before = _centroids(model)
    sizes = {"per_device_train_batch_size": 4 // accumulated}
    _train(model, tmp_path, rows, gradient_accumulation_steps=accumulated, **sizes)
    _step_by_hand(by_hand, rows)
    assert not torch.equal(_centroids(model), before)
    _assert_same(model, by_hand)
    assert not model._forward_hooks  # the callback leaves nothing behind


def test_the_callback_works_where_losses_are_averaged(tmp_path: Path) -> None:
    """A model that does not take the number of targets: Trainer divides by the micro-batches."""
    model, rows = _llama(), _tokens(4)
    by_hand = copy.deepcopy(model)
    model.accepts_loss_kwargs = False
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    _train(model, tmp_path, rows, **sizes)
    _step_by_hand(by_hand, rows)
    _assert_same(model, by_hand)


def test_the_callback_needs_the_loss_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _llama()
    hook = coterie.hf.Callback()
    hook.on_train_begin(None, None, None, model=model)
    with pytest.raises(ValueError, match="expected a model that returns its loss"):
        model.train()(_tokens())
    hook.on_train_end(None, None, None, model=model)
    model(_tokens())


def _rank(rank: int, folder: str) -> None:
    import os

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": Path(folder, "port").read_text()}
    torch.set_num_threads(1)
    model = _llama()
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    _train(model, Path(folder), _tokens(4), **sizes, ddp_backend="gloo")
    torch.save(model.state_dict(), Path(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()  # torch's threads would abort an exit now and then


def test_the_callback_works_under_ddp(tmp_path: Path) -> None:
    """Two ranks with two micro-batches each are one batch of four rows."""
    import socket

    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    by_hand = _llama()
    _step_by_hand(by_hand, _tokens(4))
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, own in by_hand.state_dict().items():
        assert torch.equal(states[0][name], states[1][name])
        torch.testing.assert_close(states[0][name], own, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("first", ["use", "lora"])
def test_lora_works_on_top(first: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = transformers.LlamaForCausalLM(config)
    if first == "use":
        model = peft.get_peft_model(coterie.hf.use(model, SPEC), lora)
    else:
        model = coterie.hf.use(peft.get_peft_model(model, lora), SPEC)
    before = _centroids(model)
    model.train()
    tokens = _tokens()
    (model(tokens, labels=tokens).loss + coterie.nn.commitment_loss(model)).backward()
    coterie.nn.update_centroids(model)
    assert not torch.equal(_centroids(model), before)
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert any("lora_B" in name for name in moved)
    model.eval()
    with torch.no_grad():
        settings = {"max_new_tokens": 4, "do_sample": False}
        cached = model.generate(input_ids=tokens, **settings)
        assert torch.equal(cached, model.generate(input_ids=tokens, **settings, use_cache=False))
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = coterie.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, merged(tokens).logits)
