"""The shortened end of a ZeRO step gives what DeepSpeed's own gives, also for gradients that are not finite."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import make_engine, make_model, make_pairs, micro_batches

from rwkv_clip.training.lean_zero import make_lean
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.masters import set_masters
from rwkv_clip.training.step import train_step

BROKEN_STEP = 2


def train(stage: int, precision: str, clip: float, lean: bool):
    """(weights, norms, which steps were applied, how often a norm was taken parameter by parameter)."""
    import torch.distributed as dist
    from deepspeed.runtime.zero import stage_1_and_2

    rank, world_size = dist.get_rank(), dist.get_world_size()
    calls = SimpleNamespace(scans=0)
    scan = stage_1_and_2.has_inf_or_nan
    stage_1_and_2.has_inf_or_nan = lambda tensor: setattr(calls, "scans", calls.scans + 1) or scan(tensor)
    model = make_model()
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = make_engine(model, 4, stage=stage, precision=precision, gradient_clipping=clip)
    if lean:
        assert make_lean(engine.optimizer)
    set_masters(engine, exact)
    norms, applied = [], []
    for step in range(4):
        batches = micro_batches(make_pairs(4 * world_size, seed=step), rank, world_size, 1)
        if step == BROKEN_STEP and rank == 1:
            batches[0].images[0] = float("nan")
        applied.append(train_step(engine, batches, ClipLoss(group=engine.data_parallel_group)).applied)
        norms.append(float(engine.get_global_grad_norm()))
    stage_1_and_2.has_inf_or_nan = scan
    weights = {name: parameter.detach().float().numpy() for name, parameter in model.named_parameters()}
    return weights, norms, applied, calls.scans


SETTINGS = [(1, "bf16", 0.5), (2, "bf16", 0.5), (1, "bf16", 0.0)]


def trainings(settings):
    return [(train(*setting, False), train(*setting, True)) for setting in settings]


@pytest.fixture(scope="module")
def runs():
    return dict(zip(SETTINGS, zip(*run_ranks(2, trainings, SETTINGS), strict=True), strict=True))


@pytest.mark.parametrize("setting", SETTINGS)
def test_weights_norms_and_skipped_steps_equal_deepspeeds_own(runs, setting) -> None:
    for (weights, norms, applied, scans), (lean_weights, lean_norms, lean_applied, lean_scans) in runs[setting]:
        assert lean_applied == applied
        assert scans > 0 and lean_scans == 0
        np.testing.assert_allclose(lean_norms, norms, rtol=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(lean_weights[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_step_with_nan_on_one_rank_is_left_out_on_all(runs) -> None:
    for _, (_, norms, applied, _) in runs[(1, "bf16", 0.5)]:
        assert applied == [step != BROKEN_STEP for step in range(4)]
        assert norms[BROKEN_STEP] == float("inf")


def test_another_optimizer_is_left_alone() -> None:
    assert not make_lean(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
