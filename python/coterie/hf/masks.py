# SPDX-License-Identifier: MIT
"""The masks of a pass: what transformers asks a mask function for, kept until a layer needs it.

Layers by a spec need padding and causality; layers that keep the model's attention need its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as known

from ..padding import Padding, make_padding


class Pattern(NamedTuple):
    """A pattern of pairs without padding: causal or not, and the keys that a window has."""

    causal: bool
    window: int | None = None


class Mask:
    """The arguments of a mask function; what layers need of them is computed once per pass."""

    ndim = 4  # transformers takes it for a finished mask

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.pattern = _pattern(arguments)
        self._own: dict[str, Any] = {}
        self._valid: Tensor | None = None
        self._paddings: tuple[Padding, Padding] | None = None
        self._pairs: Tensor | None = None
        self._outside: bool | None = None
        self._windowless: Mask | None = None
        self.new_tokens: tuple[Tensor | None] | None = None  # of RingCache

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, 1, N, S), the shape of a mask of pairs."""
        sizes = self.arguments
        return (sizes["batch_size"], 1, sizes["q_length"], sizes["kv_length"])

    def to(self, device: Any, **_: Any) -> Mask:
        """The same on another device, as accelerate asks of arguments of layers."""
        given = self.arguments["attention_mask"]
        moved = None if given is None else given.to(device)
        return Mask({**self.arguments, "attention_mask": moved, "device": device})

    def contiguous(self) -> Mask:
        """Itself; generate asks for it."""
        return self

    def own(self, implementation: str) -> Any:
        """The mask that another attention implementation of transformers expects."""
        if implementation not in self._own:
            make = known.ALL_MASK_ATTENTION_FUNCTIONS[implementation]
            self._own[implementation] = make(**self.arguments)
        return self._own[implementation]

    def pairs(self) -> Tensor:
        """The bool mask of pairs (B, 1, N, S)."""
        if self._pairs is None:
            skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self._pairs = known.sdpa_mask(**{**self.arguments, **skips})
        return self._pairs

    def windowless(self) -> Mask:
        """The same without the model's window; only for plain patterns."""
        if self.pattern is None or self.pattern.window is None:
            return self
        if self._windowless is None:
            plain: Any = known.bidirectional_mask_function
            if self.pattern.causal:
                plain = known.causal_mask_function
            self._windowless = Mask({**self.arguments, "mask_function": plain, "local_size": None})
        return self._windowless

    def dropped_keys(self) -> int:
        """Keys at the start of the sequence that a sliding cache no longer has."""
        offset: int = self.arguments["kv_offset"]
        return offset

    def _filled(self) -> int | Tensor:
        """Slots of the keys that are filled; a causal pass may leave some of a static cache."""
        S: int = self.arguments["kv_length"]
        if self.pattern is None or not self.pattern.causal:
            return S
        given = self.arguments
        end = given["q_offset"] + given["q_length"] - given["kv_offset"]
        return end if isinstance(end, Tensor) or end < S else S

    def valid(self) -> Tensor | None:
        """Which keys (B, S) exist: no padding, no empty slot of a cache. None: all of them."""
        if self._valid is not None:
            return self._valid
        B, _, _, S = self.shape
        given, filled = self.arguments["attention_mask"], self._filled()
        first = self.arguments["kv_offset"]
        if given is None:
            if not isinstance(filled, Tensor) and filled == S:
                return None
            valid = torch.ones(B, S, dtype=torch.bool, device=self.arguments["device"])
        else:
            valid = given[:, first : first + S].bool()
            valid = torch.nn.functional.pad(valid, (0, S - valid.shape[1]))
        if isinstance(filled, Tensor) or filled < S:
            valid = valid & (torch.arange(S, device=valid.device) < filled)
        self._valid = valid
        return valid

    def paddings(self) -> tuple[Padding, Padding] | None:
        """Padding of the queries and of the keys, None without."""
        valid = self.valid()
        if valid is None:
            return None
        if self._paddings is None:
            keys = make_padding(valid)
            self._paddings = (self._queries(valid, keys), keys)
        return self._paddings

    def _queries(self, valid: Tensor, keys: Padding) -> Padding:
        """The queries are the last keys of a causal pass; else they are the keys, or all count."""
        B, _, N, S = self.shape
        if N == S and not isinstance(self.arguments["q_offset"], Tensor):
            return keys
        if self.pattern is None or not self.pattern.causal:
            return Padding(torch.full((B,), N, dtype=torch.int32, device=valid.device), None)
        first = self.arguments["q_offset"] - self.arguments["kv_offset"]
        return make_padding(valid[:, torch.arange(N, device=valid.device) + first])

    def padding_is_outside(self) -> bool:
        """Whether padding is only at the start and the end of rows; asks the device once."""
        if self._outside is None:
            valid = self.valid()
            if valid is None:
                return True
            begins = valid & ~torch.nn.functional.pad(valid[:, :-1], (1, 0))
            self._outside = bool((begins.sum(1) <= 1).all())
        return self._outside


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | Mask | None = None,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Mask:
    """The mask function that :func:`coterie.hf.register` registers."""
    if isinstance(attention_mask, Mask):
        return attention_mask  # generate made it in advance
    if mask_function is None:
        mask_function = known.causal_mask_function
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # static caches change it in place
    return Mask(
        {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
            "device": device,
            **rest,
        }
    )


def _pattern(arguments: dict[str, Any]) -> Pattern | None:
    """The pattern of a mask function, None if it is neither causal nor all pairs nor a window."""
    function = arguments["mask_function"]
    if function is known.causal_mask_function:
        return Pattern(True)
    if function is known.bidirectional_mask_function:
        return Pattern(False)
    window = arguments.get("local_size")
    if window is None or torch.compiler.is_compiling():
        return None
    if _same(function, known.sliding_window_causal_mask_function(window)):
        return Pattern(True, window)
    if _same(function, known.sliding_window_bidirectional_mask_function(window)):
        return Pattern(False, 2 * window + 1)
    return None


def _same(one: Any, two: Any) -> bool:
    """Whether two functions have the same code and closures."""
    if one is two:
        return True
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    if not hasattr(one, "__code__") or not hasattr(two, "__code__"):
        return type(one) is type(two) is int and one == two
    if one.__code__ is not two.__code__:
        return False
    cells = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, two)]
    return _same(*cells)
