# SPDX-License-Identifier: MIT
"""Coterie in diffusers: attention processors.

>>> import coterie.diffusers
>>> coterie.diffusers.use(pipe.unet, "i-clustered(clusters=64,topk=32)")

A model's own processors stay: projections, norms, positions and layouts are theirs. They run with
``scaled_dot_product_attention`` replaced by a spec, for self-attention and joint attention; cross
attention is torch's. The package needs no diffusers to be imported.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from .sdpa import Replacement, Replacing, chosen_names

__all__ = ["make_processor", "use"]

_Model = TypeVar("_Model", bound=nn.Module)


def make_processor(own: Any, spec: str, seed: int = 0) -> Any:
    """A copy of an attention processor whose attention is by ``spec``.

    Its class derives from that of ``own`` and takes the same arguments, which diffusers looks at.
    """
    made = copy.copy(own)
    if not hasattr(own, "coterie_replacement"):
        kind: Any = type(own)
        made.__class__ = _class_of(kind)
    made.coterie_replacement = Replacement(spec, seed)
    return made


@functools.cache
def _class_of(base: type) -> type:
    call: Any = base.__call__

    @functools.wraps(call)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Replacing(self.coterie_replacement, f"processor: {base.__name__}"):
            return call(self, *args, **kwargs)

    return type(base.__name__, (base,), {"__call__": replaced, "__module__": base.__module__})


def use(model: _Model, spec: str, layers: Iterable[str] | None = None, seed: int = 0) -> _Model:
    """Gives the self-attention layers of a diffusers model processors with ``spec``.

    Args:
        model: a model of diffusers, such as ``pipe.unet`` or ``pipe.transformer``.
        spec: attention spec of mechanisms without learned tensors.
        layers: names of attention modules, or of modules that contain them; all by default.
        seed: seed of the clusterings.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "set_processor") and not getattr(module, "is_cross_attention", False)
    }
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no layers with attention processors")
    for name in chosen_names(found, layers):
        module: Any = found[name]
        module.set_processor(make_processor(module.processor, spec, seed))
    return model
