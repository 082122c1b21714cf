# SPDX-License-Identifier: MIT
"""The choice of specs for a model: measured on samples, verified on others.

The core chooses (include/coterie/choice.h); this module measures for it. In every layer, for every
spec of a ladder: the change of each head's attention output, and the time. Then, layer by layer,
the error of the model's output if that layer alone changes. Choices are verified by the error of
the model's output and the time of its pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..functional import GroupCall, Options, Rows, run_group
from ..groups import HeadGroup, HeadGroups
from ..library import choose
from ..spec import Group, head_groups
from .attention import NAME, OWN
from .layers import Sizes, attention_layers, attention_modules, chosen_layers, layer_sizes

_FORMAT = "coterie_specs"
_VERSION = 1
_PROBES = 2  # specs of each layer whose effect on the model's output is measured
_REPEATS = 5  # of a timed call


@dataclass(frozen=True)
class LayerChoice:
    """The attention of one layer: ``heads`` has the spec of each key/value head, ``reasons`` why it
    stays full (empty for the others)."""

    name: str
    spec: str
    heads: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Calibration:
    """Specs of the layers of a model, and what was measured.

    Errors are relative: norm of the difference of the model's outputs over the norm of those with
    full attention. ``verified`` is measured on held-out samples, ``estimated`` is the sum that the
    choice was made by, as are the seconds of attention per pass, ``time`` and ``full_time``.
    ``seconds`` and ``full_seconds`` are measured: a pass of the whole model over one sample.
    ``uniform`` is the cheapest single spec for all heads under the target, by the same estimate.
    """

    layers: list[LayerChoice]
    target: float
    length: int
    device: str
    ladder: list[str]
    verified: float
    estimated: float
    time: float
    full_time: float
    seconds: float
    full_seconds: float
    uniform: str
    uniform_error: float
    uniform_time: float

    @property
    def specs(self) -> dict[str, str]:
        """The spec of each layer by the name of its module."""
        return {layer.name: layer.spec for layer in self.layers}

    def apply(self, model: Any) -> Any:
        """Sets the attention of the model's layers; those that stay full keep the model's own."""
        from . import use_specs

        return use_specs(model, self.specs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for :func:`coterie.hf.use` and for ``--attention`` of the program."""
        about = asdict(self)
        layers = about.pop("layers")
        text = json.dumps({_FORMAT: _VERSION, "layers": layers, "about": about}, indent=1)
        partial = Path(f"{os.fspath(path)}.partial-{os.getpid()}")
        partial.write_text(text + "\n")
        partial.replace(path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Reads a file that :meth:`save` has written."""
        found = _read(path)
        try:
            layers = [LayerChoice(**layer) for layer in found["layers"]]
            return Calibration(layers=layers, **found["about"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: expected a file of Calibration.save; {error}") from None

    def __str__(self) -> str:
        """A table: the spec of each layer, and which heads stayed full and why."""
        gain = self.full_time / self.time if self.time > 0 else 1.0
        if all(layer.spec == "full" for layer in self.layers):
            lines = [f"full attention in all layers: nothing faster met the target {self.target:g}"]
        else:
            lines = [
                f"attention {gain:.2f} times as fast ({self.time * 1e3:.3g} ms instead of "
                f"{self.full_time * 1e3:.3g}), the whole model "
                f"{self.full_seconds / self.seconds:.2f} times; error {self.verified:.2g} on "
                f"held-out samples (target {self.target:g})"
            ]
        lines.append(
            f"{self.length} tokens on {self.device}; the best single spec for all heads: "
            f"{self.uniform}, {self.uniform_time * 1e3:.3g} ms, estimated error "
            f"{self.uniform_error:.2g}"
        )
        for layer in self.layers:
            lines.append(f"{layer.name}: {layer.spec}")
            for heads, reason in _runs(layer.reasons):
                if reason:
                    lines.append(f"  {heads} full: {reason}")
        return "\n".join(lines)


def _runs(reasons: Sequence[str]) -> Iterator[tuple[str, str]]:
    first = 0
    for last, reason in enumerate(reasons):
        if last + 1 == len(reasons) or reasons[last + 1] != reason:
            yield (f"head {first}" if first == last else f"heads {first}-{last}"), reason
            first = last + 1


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON; {error}") from None
    if not isinstance(found, dict) or found.get(_FORMAT) != _VERSION:
        raise ValueError(f'{path}: expected a file of specs with "{_FORMAT}": {_VERSION}')
    return found


def read_specs(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Names (empty if the writer knew none) and specs of layers, from a file of specs."""
    layers = _read(path).get("layers")
    try:
        assert isinstance(layers, list) and layers
        pairs = [(layer.get("name", ""), layer["spec"]) for layer in layers]
        assert all(isinstance(text, str) for pair in pairs for text in pair)
    except (AssertionError, AttributeError, KeyError, TypeError):
        raise ValueError(
            f'{path}: expected "layers", a list of objects with a "spec" and a "name"'
        ) from None
    return pairs


def default_ladder(length: int) -> list[str]:
    """Specs that are tried at a length: windows, and clusters with and without near keys."""
    ladder = ["full"]
    ladder += [f"local(window={w})" for w in (64, 256, 1024) if 2 * w <= length]
    counts = [c for c in (16, 64, 256) if 8 * c <= length]
    ladder += [f"clustered(clusters={c})" for c in counts]
    ladder += [f"i-clustered(clusters={c},topk=32)" for c in counts if length > 64]
    ladder += [f"i-clustered(clusters={c},topk=128)" for c in counts if length > 512]
    ladder += [f"i-clustered(clusters={c},topk=32,near=32)" for c in counts if length > 256]
    return ladder


def calibrate(
    model: Any,
    samples: Iterable[Any],
    *,
    length: int | None = None,
    target: float = 0.01,
    ladder: Sequence[str] | None = None,
    layers: Any = None,
    output: Callable[[Any], Tensor] | None = None,
    rounds: int = 8,
) -> Calibration:
    """The cheapest spec of each layer and head whose error of the model's output meets a target.

    Half of the samples are measured, and the choice is verified on the other half. The model is not
    changed: ``calibrate(...).apply(model)`` does that.

    Args:
        model: a transformers model that :func:`coterie.hf.use` supports.
        samples: two or more inputs: tensors or lists of token ids, or dicts of arguments of the
            model, each a batch of any size.
        length: sequence length to calibrate for: token ids are joined and cut into rows of that
            length. Without it inputs are used as they are; best if all have one length.
        target: largest relative error of the model's output.
        ladder: specs to choose from, of mechanisms without learned tensors; ``full`` is always
            among them. By default windows and clusters that suit the length.
        layers: the layers that may change, as in :func:`coterie.hf.use`.
        output: what of the model's output counts; by default ``logits``, else
            ``last_hidden_state``, without padding.
        rounds: choices that are verified at most.
    """
    if not target >= 0:
        raise ValueError(f"target: expected an error of 0 or more; got {target}")
    inputs = _inputs(model, samples, length)
    found = attention_layers(model)
    names = [name for name in found if name in chosen_layers(found, layers)]
    measured, held_out = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
    with _prepared(model, found), torch.no_grad():
        outputs = _Outputs(model, output)
        wanted, kept = outputs.of(measured), outputs.of(held_out)
        probes = {name: _Probe(name, found[name]) for name in names}
        tokens = _measure(model, found, probes, measured, ladder)
        rungs = next(iter(probes.values())).ladder
        for probe in probes.values():
            probe.output_error = [float("nan")] * len(rungs)
            for rung in probe.telling():
                with _specs(found, {probe.name: rungs[rung]}):
                    probe.output_error[rung] = _error(outputs.of(measured), wanted)

        def changed(specs: list[str]) -> contextlib.AbstractContextManager[None]:
            return _specs(found, {n: s for n, s in zip(names, specs, strict=True) if s != "full"})

        def verify(specs: list[str]) -> float:
            with changed(specs):
                return _error(outputs.of(held_out), kept)

        def seconds(specs: list[str]) -> float:
            with changed(specs):
                return _time_of_pass(model, held_out[0])

        sizes = [probe.sizes for probe in probes.values()]
        choice = choose(
            rungs,
            [s.heads for s in sizes],
            [s.kv_heads for s in sizes],
            [number for probe in probes.values() for number in probe.numbers()],
            target,
            rounds,
            verify,
            seconds,
        )
    return Calibration(
        layers=[_layer(choice, i, name, probes[name].sizes) for i, name in enumerate(names)],
        target=target,
        length=tokens,
        device=str(next(model.parameters()).device.type),
        ladder=list(rungs),
        verified=float(choice["verified"]),
        estimated=float(choice["error"]),
        time=float(choice["time"]),
        full_time=float(choice["full_time"]),
        seconds=float(choice["seconds"]),
        full_seconds=float(choice["full_seconds"]),
        uniform=choice["uniform"],
        uniform_error=float(choice["uniform_error"]),
        uniform_time=float(choice["uniform_time"]),
    )


def _layer(choice: dict[str, str], index: int, name: str, sizes: Sizes) -> LayerChoice:
    units = [f"{index}.{unit}" for unit in range(sizes.kv_heads)]
    return LayerChoice(
        name,
        choice[f"spec.{index}"],
        [choice[f"rung.{unit}"] for unit in units],
        [choice[f"reason.{unit}"] for unit in units],
    )


def _inputs(model: Any, samples: Iterable[Any], length: int | None) -> list[dict[str, Any]]:
    """The samples as arguments of the model."""
    device = next(model.parameters()).device
    inputs = [dict(s) if isinstance(s, Mapping) else {"input_ids": s} for s in samples]
    for one in inputs:
        if "input_ids" in one:
            ids = torch.as_tensor(one["input_ids"])
            one["input_ids"] = ids[None] if ids.dim() == 1 else ids
    if length is not None:
        inputs = _rows(inputs, length)
    if len(inputs) < 2:
        needed = "" if length is None else f" of {length} tokens, after joining them"
        raise ValueError(f"samples: expected at least 2{needed}; got {len(inputs)}")
    return [
        {k: v.to(device) if isinstance(v, Tensor) else v for k, v in one.items()} for one in inputs
    ]


def _rows(inputs: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Token ids of all inputs, joined and cut."""
    if length < 2:
        raise ValueError(f"length: expected at least 2; got {length}")
    ids = []
    for one in inputs:
        if "input_ids" not in one:
            raise ValueError("length: needs samples of token ids (input_ids); leave it out")
        mask = one.get("attention_mask")
        own = one["input_ids"]
        ids.append(
            own.flatten() if mask is None else own[torch.as_tensor(mask).bool().view_as(own)]
        )
    joined = torch.cat(ids) if ids else torch.empty(0, dtype=torch.long)
    rows = joined[: len(joined) // length * length].view(-1, 1, length)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]


class _Outputs:
    """What counts of the model's output, without padding."""

    def __init__(self, model: Any, output: Callable[[Any], Tensor] | None) -> None:
        self.model, self.output = model, output

    def of(self, inputs: list[dict[str, Any]]) -> list[Tensor]:
        return [self._one(one).double().cpu() for one in inputs]

    def _one(self, one: dict[str, Any]) -> Tensor:
        found = self.model(**one)
        if self.output is not None:
            return self.output(found)
        for name in ("logits", "last_hidden_state"):
            values = getattr(found, name, None)
            if isinstance(values, Tensor):
                break
        else:
            raise ValueError(
                "output: the model returns no logits and no last_hidden_state; name "
                "what counts, such as output=lambda result: result.pooler_output"
            )
        mask = one.get("attention_mask")
        if mask is not None and values.dim() == 3 and mask.shape == values.shape[:2]:
            values = values[mask.bool()]
        return values


def _error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The relative error; 0 of outputs that are 0."""
    change = sum(float((f - w).square().sum()) for f, w in zip(found, wanted, strict=True))
    size = sum(float(w.square().sum()) for w in wanted)
    return (change / size) ** 0.5 if change else 0.0


@contextlib.contextmanager
def _prepared(model: Any, found: dict[str, Any]) -> Iterator[None]:
    """Evaluation mode, and the model's own attention where no spec is set; undone at the end."""
    from . import adopt

    if not found:
        raise ValueError(f"model: coterie.hf.use does not support {type(model).__name__}")
    modules = attention_modules(model).values()
    training = [m for m in model.modules() if m.training]
    before = {m: (m.config._attn_implementation, getattr(m, OWN, None)) for m in modules}
    own = {m: m._modules.pop(NAME) for m in modules if NAME in m._modules}
    adopt(model)
    model.eval()
    try:
        yield
    finally:
        implementation = next(iter(before.values()))[0]
        if implementation != NAME:
            model.set_attn_implementation(implementation)
        for module, (was, remembered) in before.items():
            module.config._attn_implementation = was
            if remembered is None and hasattr(module, OWN):
                delattr(module, OWN)
            if module in own:
                module.add_module(NAME, own[module])
        for module in training:
            module.training = True


@contextlib.contextmanager
def _specs(found: dict[str, Any], specs: Mapping[str, str | HeadGroups]) -> Iterator[None]:
    """Layers with head groups, as long as it lasts."""
    from . import make_groups

    for name, spec in specs.items():
        groups = make_groups(name, found[name], spec, 0) if isinstance(spec, str) else spec
        found[name].add_module(NAME, groups)
    try:
        yield
    finally:
        for name in specs:
            del found[name]._modules[NAME]


class _Probe(HeadGroups):
    """Full attention that measures the specs of a ladder on the rows that it gets."""

    def __init__(self, name: str, layer: Any) -> None:
        self.sizes = layer_sizes(name, layer)
        heads, kv_heads, head_dim = self.sizes
        causal = bool(getattr(layer, "is_causal", False))
        super().__init__("full", heads, head_dim, kv_heads, heads * head_dim, causal, 0)
        self.name = name
        self.group_0 = _ProbeGroup(self)
        self.asked: Sequence[str] | None = None
        self.ladder: list[str] = []
        self.tokens = 0
        self.squares = torch.zeros(0)  # (units, rungs): of changes of the attention output
        self.output_error: list[float] = []
        self.times: list[float] = []  # of all heads, by rung
        self.single: list[float] = []  # of one unit, by rung; shared by layers of equal sizes
        self.own_time = 0.0

    def start(self, length: int) -> None:
        """Settles the ladder for rows of a length."""
        self.tokens = length
        if self.asked is None:
            self.ladder = [s for s in default_ladder(length) if self._fits(s)]
        else:
            self.ladder = ["full", *(s for s in self.asked if s != "full")]
        for spec in self.ladder:
            groups = head_groups(spec, self.num_heads, self.causal, self.kv_heads)
            if len(groups) != 1 or groups[0].state:
                raise ValueError(
                    "ladder: expected specs of one group and without learned tensors, which need "
                    f"training; got {spec}"
                )
        self.squares = torch.zeros(self.kv_heads, len(self.ladder), dtype=torch.float64)

    def _fits(self, spec: str) -> bool:
        try:
            head_groups(spec, self.num_heads, self.causal, self.kv_heads)
        except ValueError:
            return False
        return True

    def telling(self) -> list[int]:
        """Rungs whose effect on the model's output tells that of the others: the closest to full
        attention, and one in the middle."""
        changes = self.squares.sum(0)
        order = [int(r) for r in changes.argsort() if changes[r] > 0]
        return sorted({order[len(order) * i // _PROBES] for i in range(_PROBES)}) if order else []

    def numbers(self) -> Iterator[float]:
        """The measurements of include/coterie/choice.h."""
        units, rungs = self.kv_heads, len(self.ladder)
        yield from self.squares.sqrt().flatten().tolist()
        yield from self.output_error
        group = [0.0] * rungs
        if units > 1:
            times = zip(self.single, self.times, strict=True)
            group = [max(0.0, (units * one - all_) / (units - 1)) for one, all_ in times]
        group = [min(g, all_) for g, all_ in zip(group, self.times, strict=True)]
        for _ in range(units):
            yield from ((all_ - g) / units for all_, g in zip(self.times, group, strict=True))
        yield from group
        # Where our full attention is faster than torch's, that must not count as a gain of another
        # head's approximation.
        yield min(self.own_time, self.times[self.ladder.index("full")])


class _ProbeGroup(HeadGroup):
    def __init__(self, probe: _Probe) -> None:
        group = head_groups("full", probe.num_heads, probe.causal, probe.kv_heads)[0]
        super().__init__(group, probe.num_heads * probe.head_dim, probe.head_dim, 0)
        self.probe = [probe]  # not a submodule

    def forward(self, rows: Rows, options: Options, x: Tensor | None = None) -> Tensor:
        """The output of full attention; adds to the measurements."""
        probe = self.probe[0]
        assert rows.k is not None
        if not probe.ladder:
            probe.start(rows.v.shape[2])
        first = not probe.times
        full = run_group(GroupCall(self.group, *rows, None, options)).out
        if first:
            probe.own_time = _time_of(lambda: _torch_attention(rows, options))
        for rung, spec in enumerate(probe.ladder):
            group = head_groups(spec, probe.num_heads, options.causal, probe.kv_heads)[0]
            out, seconds = _run(group, rows, options, first)
            if first:
                probe.times.append(seconds)
            if first and len(probe.single) <= rung:
                one = Rows(rows.q[:, : group.heads // group.kv_heads], rows.k[:, :1], rows.v[:, :1])
                alone = head_groups(spec, one.q.shape[1], options.causal, 1)[0]
                probe.single.append(_run(alone, one, _first_heads(options, one), True)[1])
            change = (out.double() - full.double()).square().sum((0, 2, 3))
            probe.squares[:, rung] += change.view(probe.kv_heads, -1).sum(1).cpu()
        return full


def _first_heads(options: Options, rows: Rows) -> Options:
    if options.mask is None:
        return options
    return options._replace(mask=options.mask[:, : rows.q.shape[1]])


def _run(group: Group, rows: Rows, options: Options, timed: bool) -> tuple[Tensor, float]:
    call = GroupCall(group, *rows, None, options)
    out = run_group(call).out
    return out, _time_of(lambda: run_group(call)) if timed else 0.0


def _torch_attention(rows: Rows, options: Options) -> Tensor:
    """What the model would compute without Coterie."""
    assert rows.k is not None
    mask, causal = options.mask, options.causal and options.mask is None
    if options.k_lengths is not None and not bool((options.k_lengths == rows.v.shape[2]).all()):
        places = torch.arange(rows.v.shape[2], device=rows.v.device)
        mask, causal = (places < options.k_lengths[:, None])[:, None, None], False
    return functional.scaled_dot_product_attention(
        rows.q, rows.k, rows.v, mask, is_causal=causal, scale=options.scale or None,
        enable_gqa=rows.q.shape[1] != rows.v.shape[1],
    )  # fmt: skip


def _time_of(call: Callable[[], Any]) -> float:
    """The shortest of a few calls in seconds: what else the machine does only adds."""
    seconds = []
    for _ in range(_REPEATS + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _time_of_pass(model: Any, one: dict[str, Any]) -> float:
    return _time_of(lambda: model(**one))


def _measure(
    model: Any,
    found: dict[str, Any],
    probes: dict[str, _Probe],
    inputs: list[dict[str, Any]],
    ladder: Sequence[str] | None,
) -> int:
    """Runs the model with probes; returns the number of tokens of the first pass."""
    by_size: dict[Sizes, _Probe] = {}
    for probe in probes.values():
        probe.asked = ladder
        probe.to(next(found[probe.name].parameters()).device)
        first = by_size.setdefault(probe.sizes, probe)
        probe.single = first.single
    with _specs(found, probes):
        for one in inputs:
            model(**one)
    for probe in probes.values():
        if not probe.times:
            raise ValueError(
                f"model: {probe.name} was not reached, or has soft caps, sinks or biases, which "
                "cannot be calibrated; leave it out of layers="
            )
        if probe.ladder != next(iter(probes.values())).ladder:
            raise ValueError(
                "layers: encoder and decoder have different specs to choose from; calibrate one of "
                'them, such as layers=["encoder"]'
            )
    return next(iter(probes.values())).tokens
