# SPDX-License-Identifier: MIT
"""The choice of specs for a model: what it measures, verifies, applies and saves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import coterie  # noqa: E402
import coterie.hf  # noqa: E402
from coterie.hf import calibration  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}
LADDER = ["local(window=16)", "i-clustered(clusters=16,topk=16)", "i-clustered(clusters=4,topk=8)"]


def _bert(kind: Any = transformers.BertModel) -> Any:
    config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0)
    model = kind._from_config(config, attn_implementation="sdpa").eval()
    for name, parameter in model.named_parameters():  # so that attention is not uniform
        if "query" in name or "key" in name:
            parameter.data *= 10
    return model


def _samples(count: int = 4, length: int = 96) -> list[Tensor]:
    return [torch.randint(0, 97, (1, length)) for _ in range(count)]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention takes a second per head, others a tenth, fewer keys less."""
    run = calibration._run
    factors = dict(zip(LADDER, (0.1, 0.3, 0.2), strict=True))

    def fake(group: Any, rows: Any, options: Any, timed: bool) -> tuple[Tensor, float]:
        factor = next((f for s, f in factors.items() if s.startswith(group.name)), 1.0)
        return run(group, rows, options, False)[0], factor * rows.v.shape[1]

    monkeypatch.setattr(calibration, "_run", fake)
    monkeypatch.setattr(calibration, "_time_of", lambda call: float(4))
    monkeypatch.setattr(calibration, "_time_of_pass", lambda m, _: 5.0 - _layers_with_specs(m))


def _layers_with_specs(model: Any) -> int:
    return sum(calibration.NAME in module._modules for module in model.modules())


@torch.no_grad()
def test_where_nothing_is_faster_all_heads_stay_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_time_of", lambda call: 1.0)
    model, samples = _bert(), _samples()
    before = model(samples[0]).last_hidden_state
    found = coterie.calibrate(model, samples, target=10.0, ladder=LADDER)
    assert set(found.specs.values()) == {"full"}
    assert found.verified == 0
    assert "full attention in all layers" in str(found)
    assert all("no spec is faster" in reason for layer in found.layers for reason in layer.reasons)
    found.apply(model)
    assert torch.equal(model(samples[0]).last_hidden_state, before)


@torch.no_grad()
def test_what_is_not_faster_as_a_whole_is_given_up(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_time_of_pass", lambda m, _: 5.0 + _layers_with_specs(m))
    found = coterie.calibrate(_bert(), _samples(), target=0.3, ladder=LADDER)
    assert set(found.specs.values()) == {"full"}
    assert found.verified == 0
    assert found.seconds == found.full_seconds == 5.0
    reasons = [reason for layer in found.layers for reason in layer.reasons]
    assert all("the whole model is not faster" in reason for reason in reasons)


@pytest.mark.parametrize("target", [1e-3, 0.03, 0.3])
@torch.no_grad()
def test_the_verified_error_is_that_of_the_model(fast: None, target: float) -> None:
    model, samples = _bert(), _samples()
    held_out = torch.cat(samples[2:])
    before = model(held_out).last_hidden_state
    found = coterie.calibrate(model, samples, target=target, ladder=LADDER)
    assert torch.equal(model(held_out).last_hidden_state, before)  # not changed yet
    assert model.config._attn_implementation == "sdpa"
    assert found.verified <= target
    assert found.time <= found.full_time
    parts = [_squares(model, found, x) for x in samples[2:]]
    changes, norms = (sum(part) for part in zip(*parts, strict=True))
    assert (changes / norms) ** 0.5 == pytest.approx(found.verified, rel=1e-3, abs=1e-6)
    if target > 0.1:
        assert any(layer.spec != "full" for layer in found.layers)
        assert found.time < found.full_time
        assert found.seconds < found.full_seconds
    for layer in found.layers:
        for spec, reason in zip(layer.heads, layer.reasons, strict=True):
            assert (spec == "full") == bool(reason)
        assert f"{layer.name}: {layer.spec}" in str(found)


def _squares(model: Any, found: Any, x: Tensor) -> tuple[float, float]:
    with torch.no_grad():
        wanted = model(x).last_hidden_state
        changed = found.apply(copy.deepcopy(model))(x).last_hidden_state
    return float((changed - wanted).square().sum()), float(wanted.square().sum())


@torch.no_grad()
def test_a_file_gives_the_same_model(fast: None, tmp_path: Path) -> None:
    model, samples = _bert(), _samples()
    found = coterie.calibrate(model, samples, target=0.3, ladder=LADDER)
    path = tmp_path / "specs.json"
    found.save(path)
    assert coterie.hf.Calibration.load(path) == found
    assert [entry.name for entry in tmp_path.iterdir()] == ["specs.json"]
    torch.manual_seed(0)
    task = _bert(transformers.BertForMaskedLM)
    task.bert.load_state_dict(model.state_dict(), strict=False)
    coterie.hf.use(task, str(path))  # its layers have longer names
    wanted = found.apply(model)(samples[0]).last_hidden_state
    assert torch.equal(task.bert(samples[0]).last_hidden_state, wanted)
    whole = json.loads(path.read_text())
    for layer in whole["layers"]:
        del layer["name"]
    path.write_text(json.dumps(whole))  # as from a program without names: in order
    other = _bert()
    other.load_state_dict({k: v for k, v in model.state_dict().items() if "coterie" not in k})
    assert torch.equal(coterie.hf.use(other, path)(samples[0]).last_hidden_state, wanted)


@torch.no_grad()
def test_heads_that_share_keys_stay_together(fast: None) -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    ids = torch.randint(0, 97, (900,)).tolist()
    found = coterie.calibrate(model, [ids[:500], ids[500:]], length=200, target=0.5)
    assert found.ladder == ["full", "local(window=64)"]  # clusters have no causal form
    assert found.length == 200
    assert found.verified <= 0.5
    for layer in found.layers:
        assert len(layer.heads) == 2
        groups = coterie.head_groups(layer.spec, 4, True, 2)
        assert all(group.heads % 2 == 0 for group in groups)
    found.apply(model)


@torch.no_grad()
def test_padding_does_not_count(fast: None) -> None:
    model, samples = _bert(), _samples(2)
    plain = coterie.calibrate(model, samples, target=0.3, ladder=LADDER)
    padded = []
    for x in samples:
        junk = torch.cat([x, torch.randint(0, 97, (1, 20))], 1)
        mask = (torch.arange(junk.shape[1]) < x.shape[1]).long()[None]
        padded.append({"input_ids": junk, "attention_mask": mask})
    other = coterie.calibrate(model, padded, target=0.3, ladder=LADDER)
    assert other.specs == plain.specs
    assert other.verified == pytest.approx(plain.verified, rel=1e-3)


def test_it_really_measures() -> None:
    """Without fakes, on whatever this machine is: any answer must keep its promise."""
    model = _bert()
    found = coterie.calibrate(model, _samples(2, 200), length=100, target=0.05)
    assert found.verified <= 0.05
    assert found.ladder[0] == "full"
    assert "i-clustered(clusters=16,topk=32)" not in found.ladder  # too short
    assert found.full_time > 0


def test_restores_the_model_after_an_error() -> None:
    model = _bert().train()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="learned tensors"):
        coterie.calibrate(model, _samples(2), ladder=["routing(clusters=4,window=8)"])
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    model, samples = _bert(), _samples(2)
    for wrong, match in (
        ({"samples": samples[:1]}, "samples: expected at least 2; got 1"),
        ({"samples": samples, "length": 190}, "at least 2 of 190 tokens, after joining"),
        ({"samples": samples, "length": 1}, "length: expected at least 2"),
        ({"samples": samples, "target": -1.0}, "target"),
        ({"samples": samples, "target": float("nan")}, "target"),
        ({"samples": samples, "ladder": ["nonsense"]}, "nonsense"),
        ({"samples": samples, "ladder": ["2*full+2*local(window=4)"]}, "specs of one group"),
        ({"samples": [{"inputs_embeds": samples[0]}] * 2, "length": 9}, "input_ids"),
    ):
        with pytest.raises(ValueError, match=match):
            coterie.calibrate(model, **wrong)
    with pytest.raises(ValueError, match=r"coterie\.hf\.use does not support Linear"):
        coterie.calibrate(torch.nn.Linear(2, 2), samples)
    path = tmp_path / "wrong.json"
    for text, match in (
        ("{", "expected JSON"),
        ("[]", "coterie_specs"),
        ('{"coterie_specs": 2}', "coterie_specs"),
        ('{"coterie_specs": 1, "layers": []}', "layers"),
        ('{"coterie_specs": 1, "layers": [{"name": "x", "spec": 1}]}', "layers"),
        ('{"coterie_specs": 1, "layers": [{"name": "x", "spec": "full"}]}', "expected layers"),
        ('{"coterie_specs": 1, "layers": [{"spec": "full"}]}', "specs of 3 layers; got 1"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=match):
            coterie.hf.use(model, path)
    with pytest.raises(ValueError, match="leave layers out"):
        coterie.hf.use(model, path, layers=[0])
    with pytest.raises(ValueError, match=r"Calibration\.save"):
        coterie.hf.Calibration.load(path)
    with pytest.raises(FileNotFoundError):
        coterie.hf.use(model, "missing.json")
