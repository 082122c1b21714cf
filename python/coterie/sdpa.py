# SPDX-License-Identifier: MIT
"""Attention by a spec in place of ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .functional import GroupCall, Options, autocast_rows, run_group, settle, split_groups
from .padding import make_padding
from .spec import head_groups

_Model = TypeVar("_Model", bound=nn.Module)
_LEARNED = ("routing", "cast")  # mechanisms with tensors of their own
_NAME = "scaled_dot_product_attention"


def bool_mask(name: str, mask: Tensor) -> Tensor:
    """A mask of torch as bool: True, or 0 in a float mask, where a query may attend."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"{name}: expected bool or float; got {mask.dtype}")
    allowed = mask == 0
    clear = (allowed | (mask == -torch.inf)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(clear, f"{name}: expected 0 and -inf only")
    elif not clear:
        raise ValueError(
            f"{name}: expected a bool mask, or a float mask of 0 and -inf only; a bias of the "
            "logits is not supported"
        )
    return allowed


def check_alignment(q: Tensor, k: Tensor) -> None:
    """Causal masks of torch align the first query with the first key, the core's the last."""
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"is_causal: expected as many queries as keys; got {q.shape[2]} and {k.shape[2]}. "
            "causal=True puts the last query at the last key"
        )


class Replacement(NamedTuple):
    """A function with the arguments of scaled_dot_product_attention, by a spec.

    Calls with different numbers of queries and keys, such as cross attention and decoding with a
    cache, keep torch's attention.
    """

    spec: str
    seed: int = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.shape[-2] != key.shape[-2]:
            own = F.scaled_dot_product_attention
            rest: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return own(query, key, value, attn_mask, dropout_p, is_causal, **rest)
        if query.dim() == 3:  # (B, N, D): one head
            mask = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], -1)[:, None]
            q, k, v = (x.unsqueeze(1) for x in (query, key, value))
            return self(q, k, v, mask, dropout_p, is_causal, scale=scale).squeeze(1)
        if query.dim() != 4:
            raise ValueError(f"query: expected 3 or 4 dimensions; got {tuple(query.shape)}")
        if torch.is_autocast_enabled(query.device.type):
            query, same, value = autocast_rows(query, key, value)
            key = key if same is None else same
        mask = None if attn_mask is None else bool_mask("attn_mask", attn_mask)
        options = Options(is_causal, scale, self.seed, mask=mask, dropout=dropout_p)
        options = settle(options, query, value)
        groups = head_groups(self.spec, query.shape[1], is_causal, value.shape[1])
        calls = split_groups(query, key, value, groups, None, options)
        return torch.cat([_attend(call) for call in calls], 1)


def _attend(call: GroupCall) -> Tensor:
    group, mask = call.group, call.options.mask
    if group.name in _LEARNED or group.keys_are_queries:
        raise ValueError(
            f"spec: expected mechanisms of queries, keys and values only; got {group.text}"
        )
    if mask is None or group.takes_mask:
        return run_group(call).out
    keys = _same_for_all(mask)
    if keys is None:
        raise ValueError(
            f"attn_mask: {group.text} supports masks of keys, (B, 1, 1, S); got a mask of pairs"
        )
    padding = make_padding(keys)
    k, v = padding.to_front(call.k, 2), padding.to_front(call.v, 2)  # type: ignore[arg-type]
    options = call.options._replace(mask=None, k_lengths=padding.lengths)
    if not group.whole("near"):
        return run_group(call._replace(k=k, v=v, options=options)).out
    q = padding.to_front(call.q, 2)  # near: keys and queries are the same tokens
    options = options._replace(q_lengths=padding.lengths)
    return padding.back(run_group(call._replace(q=q, k=k, v=v, options=options)).out, 2)


def _same_for_all(mask: Tensor) -> Tensor | None:
    """The keys (B, S) of a mask (B, H, N, S) that does not depend on heads and queries."""
    for dim in (1, 2):
        if mask.shape[dim] > 1 and mask.stride(dim) != 0:
            return None
    return mask[:, 0, 0]


class Replacing(TorchFunctionMode):
    """Calls of scaled_dot_product_attention inside use a :class:`Replacement`; one is expected."""

    calls = 0  # of all replacements, by any thread

    def __init__(self, replacement: Replacement, where: str) -> None:
        super().__init__()
        self.replacement, self.where = replacement, where
        self._before = 0

    def __enter__(self) -> Any:
        self._before = Replacing.calls
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        compiling = torch.compiler.is_compiling()
        if error is None and not compiling and Replacing.calls == self._before:
            raise RuntimeError(
                f"{self.where} did not call {_NAME}, so {self.replacement.spec} was not used; "
                "leave it out of layers=, or choose torch's attention in the model's settings"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            if not torch.compiler.is_compiling():
                Replacing.calls += 1
            return self.replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Replaced:
    """Base of the classes of modules that :func:`apply` changes."""

    coterie_replacement: Replacement

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Replacing(self.coterie_replacement, f"model: {type(self).__name__}"):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def apply(model: _Model, spec: str, layers: Iterable[str] | None = None, seed: int = 0) -> _Model:
    """Replaces scaled_dot_product_attention by ``spec`` in the modules of a model that call it.

    For models with attention of their own; for transformers use :func:`coterie.hf.use`. Arguments
    keep their meaning: masks of keys are padding, masks of pairs need a spec that supports them,
    biases and dropout are refused. Cross attention and decoding with a cache, which have more keys
    than queries, keep torch's attention.

    Args:
        model: any module; it is changed in place. Calling it again sets another spec.
        spec: attention spec of mechanisms without learned tensors, for the number of heads of each
            call.
        layers: names of the modules, or of ones that contain them; by default all that call
            ``scaled_dot_product_attention`` in one of their methods, or in a function they call.
        seed: seed of the clusterings.
    """
    found = {name: m for name, m in model.named_modules() if _calls_attention(type(m))}
    if not found:
        raise ValueError(
            f"model: no module of {type(model).__name__} calls {_NAME}; for transformers use "
            "coterie.hf.use, for torch.nn.TransformerEncoder coterie.nn.swap_attention"
        )
    for module in (found[name] for name in chosen_names(found, layers)):
        own_class: type = type(module)
        if not issubclass(own_class, _Replaced):
            module.__class__ = _class_of(own_class)
        module.coterie_replacement = Replacement(spec, seed)
    return model


def chosen_names(found: Iterable[str], layers: Iterable[str] | None) -> list[str]:
    """The names in or below ``layers``, names of modules; all by default."""
    if layers is None:
        return list(found)
    chosen: list[str] = []
    for layer in [layers] if isinstance(layers, str) else layers:
        own = [name for name in found if f".{layer}." in f".{name}."]
        if not own:
            raise ValueError(f"layers: expected some of {sorted(found)}; got {layer!r}")
        chosen += own
    return chosen


_CLASSES: dict[type, type] = {}


def _class_of(own: type) -> type:
    if own not in _CLASSES:
        body = {"__reduce_ex__": _reduce, "__module__": own.__module__}
        _CLASSES[own] = type(own.__name__, (_Replaced, own), body)
    return _CLASSES[own]


def _reduce(module: nn.Module, protocol: int) -> Any:
    """For pickle and copy, which find classes by name."""
    return _restore, (type(module).__mro__[2], module.__dict__.copy())


def _restore(own: type, state: dict[str, Any]) -> nn.Module:
    made = _class_of(own)
    module: nn.Module = object.__new__(made)
    module.__setstate__(state)
    return module


def _calls_attention(module: type) -> bool:
    for base in module.__mro__:
        if base in (nn.Module, _Replaced) or base.__module__.startswith("torch.nn."):
            continue
        if any(_mentions(member) for member in vars(base).values()):
            return True
    return False


def _mentions(member: Any) -> bool:
    function = getattr(member, "__func__", member)
    if not isinstance(function, types.FunctionType):
        return False
    function = inspect.unwrap(function)
    names = function.__code__.co_names
    if _NAME in names:
        return True
    called: Iterable[Callable[..., Any] | None] = map(function.__globals__.get, names)
    return any(isinstance(f, types.FunctionType) and _NAME in f.__code__.co_names for f in called)
