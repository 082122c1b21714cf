# SPDX-License-Identifier: MIT
"""Routing heads in transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ..nn import commitment_loss, update_centroids


class Callback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Adds the commitment loss to the model's and moves the centroids of routing heads.

    ``Trainer(model, ..., callbacks=[coterie.hf.Callback()])``. The loss that the model returns in
    training includes the commitment loss of its pass; centroids move once per optimiser step, by
    the tokens of all micro-batches and of all ranks.
    """

    def __init__(self) -> None:
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remove()
        self._hook = kwargs["model"].register_forward_hook(_add_commitment, with_kwargs=True)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        update_centroids(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _add_commitment(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    if not model.training or not torch.is_grad_enabled():
        return output
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is None:
        raise ValueError(
            "Callback: expected a model that returns its loss; with a loss of your own, add "
            "coterie.nn.commitment_loss(model) to it and call coterie.nn.update_centroids(model)"
        )
    output["loss"] = loss + _share(model, kwargs) * commitment_loss(model)
    return output


def _share(model: nn.Module, kwargs: dict[str, Any]) -> Tensor | float:
    """The weight of this pass in the step.

    Trainer averages losses over micro-batches and ranks, unless it tells the model the number of
    targets of the whole step; then it adds up losses, each with the share of its targets.
    """
    total, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
    if total is None or labels is None:
        return 1.0
    own: Any = model
    shifts = LOSS_MAPPING.get(getattr(own, "loss_type", None)) is ForCausalLMLoss
    if shifts and not getattr(own.config, "is_encoder_decoder", False):
        labels = labels[..., 1:]
    share: Tensor = labels.ne(-100).sum() / total
    return share
