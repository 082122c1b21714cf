# SPDX-License-Identifier: MIT
"""Models that were saved with specs: ``save_pretrained`` writes them, this reads them back."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .layers import attention_layers


def from_pretrained(model_class: Any, path: Any, **kwargs: Any) -> Any:
    """``model_class.from_pretrained(path, **kwargs)`` with the specs that the model was saved with.

    Centroids and other learned tensors of the layers' mechanisms are those of the file.
    ``model_class``: any class of transformers with ``from_pretrained``, such as ``AutoModel``.
    """
    from . import adopt, make_groups

    model = model_class.from_pretrained(path, **kwargs)
    specs = getattr(model.config, "coterie_layers", None)
    if not specs:
        raise ValueError(f"path: {path} was saved without specs; use coterie.hf.use(model, spec)")
    found = attention_layers(model)
    groups = {}
    for name, layer in found.items():
        spec = next((s for saved, s in specs.items() if same_name(saved, name)), None)
        if spec is not None:
            groups[name] = make_groups(name, layer, spec, 0)
    if not groups:
        raise ValueError(f"path: expected layers among {sorted(found)}; got {sorted(specs)}")
    adopt(model)
    model.config.coterie_layers = {name: own.spec for name, own in groups.items()}
    for name, own in groups.items():
        found[name].coterie = own
    _load(model, path, [f"{name}.coterie." for name in groups], kwargs)
    return model


def same_name(one: str, two: str) -> bool:
    """Whether two names are of one module, in models of which one may contain the other."""
    return f".{one}".endswith(f".{two}") or f".{two}".endswith(f".{one}")


def _load(model: Any, path: Any, prefixes: list[str], kwargs: dict[str, Any]) -> None:
    wanted = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name.startswith(tuple(prefixes))
    }
    saved = _saved_tensors(path, kwargs) if wanted else {}
    for name, tensor in wanted.items():
        own = next((value for key, value in saved.items() if same_name(key, name)), None)
        if own is None or own.shape != tensor.shape:
            got = "none" if own is None else tuple(own.shape)
            raise ValueError(f"path: expected {name} of shape {tuple(tensor.shape)}; got {got}")
        with torch.no_grad():
            tensor.copy_(own)


def _saved_tensors(path: Any, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of head groups in the safetensors files of a model."""
    where = {k: kwargs[k] for k in ("revision", "subfolder", "token", "cache_dir") if k in kwargs}
    quiet = {"_raise_exceptions_for_missing_entries": False}
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **where, **quiet)
    names = [SAFE_WEIGHTS_NAME]
    if index is not None:
        with open(index) as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    found: dict[str, Tensor] = {}
    for name in names:
        with safe_open(cached_file(path, name, **where), framework="pt") as file:
            keys = [key for key in file.keys() if ".coterie." in key]  # noqa: SIM118  no dict
            found |= {key: file.get_tensor(key) for key in keys}
    return found
