"""The model against outputs and gradients of the published one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden import check_golden, check_golden_in_bfloat16

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["small", "b32"])
def test_outputs_loss_and_gradients_equal_the_published_models(fixtures: Path, name: str, device: str) -> None:
    check_golden(fixtures / "golden", name, device)


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_weights_stay_close_to_the_published_outputs(fixtures: Path, device: str) -> None:
    check_golden_in_bfloat16(fixtures / "golden", "small", device)
