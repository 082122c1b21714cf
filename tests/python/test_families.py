# SPDX-License-Identifier: MIT
"""Every family of transformers models by name: its own results, padding, generation.

``COTERIE_WRITE_DOCS=1 pytest test_families.py`` writes the table in docs/python.md.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from families import FAMILIES, Family, difference, inputs_of, result  # noqa: E402

import coterie.hf  # noqa: E402

BOUND = 2e-5
SIDES = ("none", "left", "right")
NAMES = [family.name for family in FAMILIES]
GENERATING = [family.name for family in FAMILIES if family.generates]
GENERATION = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "static cache, beams": {"cache_implementation": "static", "num_beams": 3},
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def _family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def _exact_spec(family: Family) -> str:
    """i-clustered with as many top keys as tokens, which approximates nothing."""
    causal = ",causal=reference" if family.causal else ""
    return f"i-clustered(clusters=5,topk=64{causal})"


def _stack(family: Family) -> list[str] | None:
    return ["encoder"] if family.kind in ("pair", "speech") else None


@functools.cache
@torch.no_grad()
def _error(name: str, spec: str | None) -> float:
    """The largest difference from the model's own results over padding at any side.

    ``spec`` None: i-clustered with all keys, in encoder-decoder models in the encoder.
    """
    family = _family(name)
    largest = 0.0
    for side in SIDES:
        model = family.build()
        inputs, counted = inputs_of(family, side)
        own = result(model, inputs)
        layers = _stack(family) if spec is None else None
        coterie.hf.use(model, spec or _exact_spec(family), layers=layers)
        largest = max(largest, difference(own, result(model, inputs), counted))
    return largest


@functools.cache
@torch.no_grad()
def _generates(name: str, way: str) -> bool:
    """Whether generation with full attention gives the model's own tokens, and near logits."""
    family = _family(name)
    model = family.build()
    inputs, _ = inputs_of(family, "left")
    inputs.pop("decoder_input_ids", None)
    settings: dict[str, Any] = {
        "max_new_tokens": 10,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "disable_compile": True,
        **GENERATION[way],
    }
    own = model.generate(**inputs, **settings)
    coterie.hf.use(model, "full")
    ours = model.generate(**inputs, **settings)
    if not torch.equal(ours.sequences, own.sequences):
        return False
    gaps = [(a - b).abs().max().item() for a, b in zip(ours.logits, own.logits, strict=True)]
    return max(gaps) < BOUND


@pytest.mark.parametrize("name", NAMES)
def test_full_is_the_attention_of_the_model(name: str) -> None:
    assert _error(name, "full") < BOUND


@pytest.mark.parametrize("name", NAMES)
def test_i_clustered_with_all_keys_is_full_attention(name: str) -> None:
    family = _family(name)
    if family.refuses:
        with pytest.raises(ValueError, match=family.refuses):
            _error(name, None)
    else:
        assert _error(name, None) < BOUND


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_reaches_the_layers(name: str) -> None:
    """Otherwise the comparisons above compare a model with itself."""
    assert _error(name, "local(window=2)") > 100 * BOUND


@pytest.mark.parametrize("way", GENERATION)
@pytest.mark.parametrize("name", GENERATING)
def test_full_generates_the_tokens_of_the_model(name: str, way: str) -> None:
    assert _generates(name, way)


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen 2", "Qwen 3", "OLMo 2", "Phi 3", "GPT-2", "GPT-NeoX"]
)
@torch.no_grad()
def test_a_quantised_cache_of_plain_tensors_works(name: str) -> None:
    model = _family(name).build()
    inputs, _ = inputs_of(_family(name), "left")
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "quantized"}
    settings |= {"cache_config": {"backend": "fp8"}}
    try:
        own = model.generate(**inputs, **settings)
    except (ValueError, ImportError) as error:
        pytest.skip(f"this transformers has none: {error}")
    coterie.hf.use(model, "full")
    assert torch.equal(model.generate(**inputs, **settings), own)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("BERT", "i-clustered(clusters=5,topk=8)"),
        ("ModernBERT", "i-clustered(clusters=5,topk=8)"),
        ("Llama", "2*local(window=6)+2*routing(clusters=3,window=5)"),
    ],
)
@torch.no_grad()
def test_a_compiled_model_gives_the_same_in_one_graph(name: str, spec: str) -> None:
    torch.compiler.reset()
    model = coterie.hf.use(_family(name).build(), spec)
    inputs, counted = inputs_of(_family(name), "left")
    if name == "Llama":
        inputs["use_cache"] = False
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    eager = result(model, inputs)
    assert difference(eager, result(compiled, inputs), counted) < BOUND


def _row(family: Family) -> list[str]:
    full = f"{_error(family.name, 'full'):.0e}"
    term = family.refuses.split(":")[0]
    exact = f"refused: {term}" if family.refuses else f"{_error(family.name, None):.0e}"
    ways = [way for way in GENERATION if family.generates and _generates(family.name, way)]
    generate = "equal" if len(ways) == len(GENERATION) else ", ".join(ways)
    return [family.name, full, exact, generate if family.generates else ""]


TABLE = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end of families -->)", re.DOTALL)


def test_the_table_in_the_documentation_is_right() -> None:
    """Names, refusals and generation as measured; errors, which depend on the CPU, bounded."""
    path = Path(__file__).parents[2] / "docs" / "python.md"
    rows = [_row(family) for family in FAMILIES]
    if os.environ.get("COTERIE_WRITE_DOCS"):
        heading = ["family", "error of `full`", "error of `i-clustered`", "generate"]
        lines = [heading, ["---"] * 4, *rows]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        path.write_text(TABLE.sub(lambda _: table, path.read_text()))
    table = TABLE.search(path.read_text())
    assert table is not None
    written = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()]
    assert len(written[2:]) == len(rows)
    for row, own in zip(written[2:], rows, strict=True):
        for one, other in zip(row, own, strict=True):
            if re.fullmatch(r"\de-\d\d", other):
                assert float(one) < BOUND
            else:
                assert one == other
