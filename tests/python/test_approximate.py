# SPDX-License-Identifier: MIT
"""coterie approximate on a tiny random BERT and tiny generated data: every task, the choice, the report, refusals."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
PROGRAM = os.environ.get("COTERIE_PROGRAM", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="the program was built without training")

WORDS = [f"w{i}" for i in range(60)]
SPECS = ["i-clustered(clusters=4,topk=200)", "1*full+3*clustered(clusters=2)"]


def sentence(rng: random.Random, words: int = 8, pool: list[str] = WORDS) -> str:
    """Random words."""
    return " ".join(rng.choice(pool) for _ in range(words))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT whose vocabulary is WORDS."""
    folder = tmp_path_factory.mktemp("model")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2,
                                     num_attention_heads=4, intermediate_size=48, max_position_embeddings=128)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of all tasks, as it is published."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(1)
    for name in ("STS-B", "SST-2", "RTE"):
        (folder / name).mkdir()
    rows = []
    for _ in range(40):
        first = sentence(rng)
        same = rng.randrange(9)
        rows.append(f'"{first}","{" ".join(first.split()[:same] + sentence(rng).split()[same:])}",{same / 2}')
    (folder / "STS-B/stsb-en-test.csv").write_text("\n".join(rows) + "\n")
    for part, count in (("train", 60), ("dev", 30)):
        lines = ["sentence\tlabel"]
        pairs = ["index\tsentence1\tsentence2\tlabel"]
        for i in range(count):
            lines.append(f"{sentence(rng, 6, WORDS[:30] if i % 2 else WORDS[30:])}\t{i % 2}")
            pairs.append(f"{i}\t{sentence(rng)}\t{sentence(rng)}\t{'not_' * (i % 2)}entailment")
        (folder / f"SST-2/{part}.tsv").write_text("\n".join(lines) + "\n")
        (folder / f"RTE/{part}.tsv").write_text("\n".join(pairs) + "\n")
    for part in ("train", "test"):
        reviews = [{"text": sentence(rng, 20, WORDS[:30] if i % 2 else WORDS[30:]), "label": i % 2} for i in range(40)]
        (folder / f"tiny.{part}.jsonl").write_text("".join(json.dumps(review) + "\n" for review in reviews))
    articles = []
    for article in range(42):
        context = sentence(rng, 40)
        answer = context.split()[article % 30]
        asked = [{"id": f"{article}", "question": sentence(rng, 5),
                  "answers": [{"text": answer, "answer_start": context.find(answer)}]}]
        articles.append({"title": str(article), "paragraphs": [{"context": context, "qas": asked}]})
    (folder / "dev-v1.1.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    (folder / "text.txt").write_text(sentence(rng, 4000))
    return folder


def call(*words: object, status: int = 0) -> str:
    """Output of the program."""
    done = subprocess.run([PROGRAM, "approximate", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines(path: Path, kind: str) -> list[dict]:
    """Lines of a record."""
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


@pytest.mark.parametrize(("task", "scores", "more"), [
    ("text", [], ["--length", "64"]),
    ("sts-b", ["Spearman", "Pearson"], []),
    ("sts-b", ["Spearman", "Pearson"], ["--join", "32"]),
    ("squad-retrieval", ["recall@1", "MRR@10"], []),
    ("imdb-probe", ["accuracy"], ["--limit", "20"]),
    ("glue", ["accuracy"], ["--glue", "SST-2"]),
    ("glue", ["accuracy"], ["--glue", "RTE", "--tune", "--epochs", "1"]),
    ("squad", ["exact match", "F1"], ["--epochs", "1", "--length", "64", "--join", "50"]),
])
def test_tasks(model: Path, data: Path, tmp_path: Path, task: str, scores: list[str], more: list[str]) -> None:
    record = tmp_path / "record.jsonl"
    call(model, "--task", task, "--data", data, "--attention", *SPECS, "--json", record, "--draws", 50, *more)
    head, results = lines(record, "approximate")[0], lines(record, "result")
    assert head["task"] == task and head["units"] > 0 and "commit" in head["machine"]
    assert [result["attention"] for result in results] == ["full", *SPECS]
    for result in results:
        assert [score["name"] for score in result["scores"]] == scores
        for score in result["scores"]:
            assert score["value"][1] <= score["value"][0] <= score["value"][2]
        assert len(result["head_error"]) == 2 and len(result["head_error"][0]) == 4
        assert result["tokens_per_s"] > 0
    # The budget covers every input, so nothing changes.
    assert results[1]["exact_share"] == 1 and results[1]["cosine"] > 0.99999
    # Rounding may exchange neighbouring ranks.
    assert all(abs(score["difference"][0]) < 0.02 for score in results[1]["scores"])
    assert results[2]["exact_share"] < 1 and results[2]["head_error"][0][0] < 1e-5 < results[2]["head_error"][0][1]


def test_equal_calls_give_equal_scores(model: Path, data: Path, tmp_path: Path) -> None:
    found = []
    for threads in (1, 2):
        record = tmp_path / f"{threads}.jsonl"
        call(model, "--task", "glue", "--glue", "SST-2", "--tune", "--epochs", 1, "--data", data, "--attention",
             SPECS[1], "--json", record, "--threads", threads, "--draws", 20)
        found.append([result["scores"] for result in lines(record, "result")])
    assert found[0] == found[1]


def test_speed_and_report(model: Path, data: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    out = call(model, "--task", "sts-b", "--data", data, "--attention", SPECS[1], "--lengths", "32,64", "--torch",
               "--seconds", 0, "--report", page, "--draws", 20)
    assert "times full" in out and "torch (scaled_dot_product_attention)" in out
    html = page.read_text()
    assert "Spearman" in html and "Head error" in html and "Speed by length" in html


def test_choice(model: Path, data: Path, tmp_path: Path) -> None:
    record, specs = tmp_path / "record.jsonl", tmp_path / "specs.json"
    out = call(model, "--data", data / "text.txt", "--length", 96, "--target", 0.5, 0.000001, "--samples", 2,
               "--seconds", 0, "--ladder", "local(window=8)", "clustered(clusters=4)", "full", "--json", record,
               "--out", specs)
    assert "full attention is the answer" in out  # for the second target
    calibration = lines(record, "calibration")[0]
    assert [rung["name"] for rung in calibration["uniform"]] == calibration["ladder"]
    for target in calibration["targets"]:
        assert target["measured"]["error"] <= target["target"]
    file = json.loads(specs.read_text())
    assert file["coterie_specs"] == 1 and len(file["layers"]) == 2
    again = call(model, "--data", data / "text.txt", "--length", 96, "--attention", specs)
    assert "specs.json" in again


def train(out: Path, *words: str) -> Path:
    """A run of two steps."""
    subprocess.run([PROGRAM, "train", "--out", str(out), "--length", "64", "--train.steps", "2", "--train.batch", "2",
                    "--model.dim", "16", "--model.layers", "2", "--model.heads", "4", "--train.eval-batches", "1",
                    "--train.final-batches", "1", "--threads", "1", *words], check=True, capture_output=True)
    return out


def test_choice_for_a_run(data: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--task", "masked", "--attention", "2*full+2*full(positions=none)")
    record, specs = tmp_path / "record.jsonl", tmp_path / "specs.json"
    choose = [run, "--data", data / "text.txt", "--length", 96, "--seconds", 0, "--samples", 2]
    call(*choose, "--target", 0.5, "--ladder", "local(window=8)", "full", "--json", record, "--out", specs)
    (head,), (calibration,) = lines(record, "approximate"), lines(record, "calibration")
    assert head["task"] == "masked" and head["length"] == 96 and calibration["batch"] == 2
    assert len(calibration["layer_seconds"]) == 2 and len(calibration["layer_seconds"][0]) == 2
    assert calibration["targets"][0]["measured"]["error"] <= 0.5
    layers = json.loads(specs.read_text())["layers"]
    assert [layer["name"] for layer in layers] == [f"transformer.layers.{i}.attention" for i in range(2)]
    assert all("positions=rotary" in layer["spec"] and "positions=none" in layer["spec"] for layer in layers)
    other = json.dumps({"coterie_specs": 1, "layers": [{"spec": "1*full+3*local(window=4)"}, {"spec": "full"}]})
    specs.write_text(other)  # in other groups than the trained ones
    done = subprocess.run([PROGRAM, "eval", run, "--attention", specs, "full", "--json"], check=True, capture_output=True)
    scores = [json.loads(line)["metric"] for line in done.stdout.splitlines()]
    assert scores[2] == scores[0] != scores[1]
    assert "expected --target for a run" in call(run, "--data", data / "text.txt", "--attention", "full", status=2)
    causal = train(tmp_path / "causal", "--task", "bytes")
    assert "sees both sides" in call(causal, "--data", data / "text.txt", "--target", 0.1, status=2)
    local = train(tmp_path / "local", "--task", "masked", "--attention", "local(window=8)")
    assert "trained with full attention" in call(local, "--data", data / "text.txt", "--target", 0.1, status=2)


@pytest.mark.parametrize(("words", "wanted"), [
    (["--task", "sts-b"], "--data"),
    (["--task", "sts-b", "--data", "none"], "no such file"),
    (["--task", "glue", "--glue", "CoLA", "--data", "DATA"], "CoLA/train.tsv"),
    (["--task", "sts-b", "--data", "DATA", "--target", "0.1"], "--task text"),
    (["--data", "DATA", "--attention", "routing(clusters=2,window=4)"], "centroids; got one with none"),
    (["--data", "DATA", "--attention", "3*full"], "heads"),
    (["--data", "DATA/text.txt", "--length", "100k"], "too short"),
    (["--data", "DATA", "--target", "2"], "from 1e-06 to 1"),
    (["--data", "DATA", "--out", "x.json"], "--target"),
    (["--data", "DATA", "--torch"], "--lengths"),
])
def test_refusals(model: Path, data: Path, words: list[str], wanted: str) -> None:
    status = 2
    text = call(model, *[word.replace("DATA", str(data)) for word in words], status=status)
    assert wanted in text
    assert text.count("\n") <= 2


def test_wrong_folder(tmp_path: Path, data: Path) -> None:
    assert "config.json" in call(tmp_path, "--data", data, status=2)
    assert "no such folder" in call(tmp_path / "none", "--data", data, status=2)


def test_empty_data(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "no text" in call(model, "--data", tmp_path / "empty.txt", status=2)
