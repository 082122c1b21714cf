# SPDX-License-Identifier: MIT
"""Settings for all Python tests."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configs
hypothesis.settings.register_profile("coterie", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("coterie")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
