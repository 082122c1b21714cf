# SPDX-License-Identifier: MIT
"""The native library: the operators ``torch.ops.coterie.*``, and facts about specs and builds.

The namespace of the operators is the build's: several builds can be loaded into one process.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_OLDEST_TORCH = (2, 11)
_MEASURE = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_char_p)


def _load() -> ctypes.CDLL:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        raise ImportError(f"coterie needs torch 2.11 or newer; this is {torch.__version__}")
    path = Path(__file__).with_name("libcoterie_ops.so")
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    numbers = [ctypes.c_int64, ctypes.c_int64]
    library.coterie_describe.argtypes = [ctypes.c_char_p, *numbers, ctypes.c_bool]
    library.coterie_layer_spec.argtypes = [ctypes.c_char_p, ctypes.c_bool]
    library.coterie_group_seed.argtypes = [ctypes.c_uint64, *numbers]
    library.coterie_group_seed.restype = ctypes.c_int64
    library.coterie_set_threads.argtypes = [ctypes.c_int]
    library.coterie_set_fast.argtypes = [ctypes.c_bool]
    library.coterie_set_fast.restype = None
    whole, real = ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_double)
    library.coterie_choose.argtypes = [ctypes.c_char_p, ctypes.c_int64, whole, whole, real]
    library.coterie_choose.argtypes += [ctypes.c_double, ctypes.c_int, _MEASURE, _MEASURE]
    names = ("describe", "layer_spec", "choose", "build_facts", "spec_help", "set_threads")
    for function in names:
        getattr(library, f"coterie_{function}").restype = ctypes.c_char_p
    return library


_LIBRARY = _load()


def _text(answer: bytes) -> str:
    text = answer.decode()
    if text.startswith("!"):
        raise ValueError(text[1:])
    return text


def _table(lines: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines.splitlines())


def describe(spec: str, heads: int, kv_heads: int, causal: bool) -> list[dict[str, str]]:
    """The head groups of a spec, with all automatic parameters resolved."""
    text = _text(_LIBRARY.coterie_describe(spec.encode(), heads, kv_heads, causal))
    return [_table(group) for group in text.split("\n\n")]


def layer_spec(spec: str, causal: bool) -> str:
    """The spec with the defaults of a layer (include/coterie/layer.h)."""
    return _text(_LIBRARY.coterie_layer_spec(spec.encode(), causal))


@torch.compiler.assume_constant_result
def _group_seed(seed: int, layer: int, group: int) -> int:
    found: int = _LIBRARY.coterie_group_seed(seed, layer, group)
    return found


def group_seed(seed: int, layer: int, group: int) -> int:
    """The seed of one group of one layer (include/coterie/layer.h), signed."""
    # operator.index makes torch.compile specialise on the seed.
    own: int = _group_seed(operator.index(seed), layer, group)
    return own


def choose(
    ladder: Sequence[str],
    heads: Sequence[int],
    units: Sequence[int],
    numbers: Sequence[float],
    target: float,
    rounds: int,
    verify: Callable[[list[str]], float],
    seconds: Callable[[list[str]], float],
) -> dict[str, str]:
    """choose_verified of include/coterie/choice.h; ``numbers``: its measurements, layer by layer.

    ``verify`` and ``seconds`` get one spec per layer and return the error of the model's output and
    the time of a pass.
    """
    raised: list[BaseException] = []

    def callback(measure: Callable[[list[str]], float]) -> Any:
        def call(specs: bytes) -> float:
            try:
                return measure(specs.decode().split("\n"))
            except BaseException as error:  # ctypes would print it and go on
                raised.append(error)
                return float("nan")

        return _MEASURE(call)

    whole, real = ctypes.c_int64 * len(heads), ctypes.c_double * len(numbers)
    answer = _LIBRARY.coterie_choose(
        "\n".join(ladder).encode(),
        len(heads),
        whole(*heads),
        whole(*units),
        real(*numbers),
        target,
        rounds,
        callback(verify),
        callback(seconds),
    )
    if raised:
        raise raised[0]
    return _table(_text(answer))


def build_facts() -> dict[str, str]:
    """Version, compiler, CUDA toolkit, processor and threads."""
    return _table(_text(_LIBRARY.coterie_build_facts()))


def spec_help() -> str:
    """Names, keys, defaults and meanings of all mechanisms."""
    return _text(_LIBRARY.coterie_spec_help())


NAMESPACE = build_facts()["operators"]
operators = getattr(torch.ops, NAMESPACE)


def set_threads(count: int) -> None:
    """Sets the number of threads of CPU operators; results do not depend on it."""
    _text(_LIBRARY.coterie_set_threads(count))


def set_fast(allowed: bool) -> None:
    """Allows kernels whose bits differ from run to run, in the whole process; at first not.

    They are cuDNN's: the backward pass of ``full`` in 16 bit on Hopper. Equal bits cost about 3 %
    of a training step.
    """
    _LIBRARY.coterie_set_fast(allowed)
