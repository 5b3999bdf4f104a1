"""The shortened ZeRO step gives what DeepSpeed's own gives, also for gradients that are not finite."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import make_engine, make_model, make_pairs, micro_batches
from torch.utils._python_dispatch import TorchDispatchMode

from rwkv_clip.training.lean_zero import leaves_no_gradients, make_lean
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.masters import set_masters
from rwkv_clip.training.step import train_step

BROKEN_STEP = 2


def make_training(stage: int, precision: str, clip: float, accumulation: int, lean: bool):
    """(engine, its model): one with a parameter that no gradient reaches."""
    model = make_model()
    model.spare = torch.nn.Parameter(torch.linspace(0, 1, 7))
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    options = {"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "fp16" else {}
    engine = make_engine(model, 4, accumulation, stage, precision, gradient_clipping=clip, **options)
    if lean:
        assert make_lean(engine.optimizer)
    set_masters(engine, exact)
    return engine, model


def train(stage: int, precision: str, clip: float, accumulation: int, lean: bool) -> SimpleNamespace:
    """What four steps give: gradients of the first, weights, norms, which were applied; and what they cost."""
    import torch.distributed as dist
    from deepspeed.runtime.zero import stage_1_and_2
    from deepspeed.utils import safe_get_full_grad

    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine, model = make_training(stage, precision, clip, accumulation, lean)
    result = SimpleNamespace(gradients={}, norms=[], applied=[], scans=0)
    scan = stage_1_and_2.has_inf_or_nan

    def counting_scan(tensor):
        result.scans += 1
        return scan(tensor)

    def recording_step(step=engine.step):
        if engine.is_gradient_accumulation_boundary() and not result.gradients:
            for name, parameter in model.named_parameters():
                result.gradients[name] = safe_get_full_grad(parameter).float().numpy().copy()
        step()

    stage_1_and_2.has_inf_or_nan, engine.step = counting_scan, recording_step
    for step in range(4):
        batches = micro_batches(make_pairs(4 * world_size * accumulation, seed=step), rank, world_size, accumulation)
        if step == BROKEN_STEP and rank == world_size - 1:
            batches[0].images[0] = float("nan")
        loss = ClipLoss(group=engine.data_parallel_group)
        result.applied.append(train_step(engine, batches, loss, "micro").applied)
        result.norms.append(float(engine.get_global_grad_norm()))
        assert all(parameter.grad is None for parameter in model.parameters())
    stage_1_and_2.has_inf_or_nan = scan
    result.weights = {name: parameter.detach().float().numpy() for name, parameter in model.named_parameters()}
    result.hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    result.leaves_no_gradients = leaves_no_gradients(engine.optimizer)
    return result


# ZeRO stage, precision, largest norm, micro batches.
SETTINGS = [(1, "bf16", 0.5, 1), (2, "bf16", 0.5, 1), (1, "bf16", 0.0, 1), (1, "bf16", 0.5, 2), (1, "fp16", 0.5, 1)]
SETTINGS += [(1, "fp32", 0.5, 1), (1, "fp32", 0.0, 2)]


def trainings(settings):
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed refuses fp16 on a CPU without fp16 units, where PyTorch is merely slow.
    get_accelerator().is_fp16_supported = lambda: True
    return [(train(*setting, False), train(*setting, True)) for setting in settings]


@pytest.fixture(scope="module")
def runs():
    """By setting: each of two ranks' (DeepSpeed's own run, the shortened one)."""
    return dict(zip(SETTINGS, zip(*run_ranks(2, trainings, SETTINGS), strict=True), strict=True))


def assert_equal_runs(own, lean, clip: float) -> None:
    assert lean.applied == own.applied
    assert lean.scans == 0
    np.testing.assert_allclose(lean.norms, own.norms, rtol=1e-5)
    assert np.abs(own.gradients["image_model.0.weight"]).max() > 0
    for name, gradient in own.gradients.items():
        np.testing.assert_array_equal(lean.gradients[name], gradient, err_msg=name)
        # The norm is added up in another order, and with it the clipped gradients are others in the last digit.
        tolerances = {"rtol": 1e-5, "atol": 1e-7} if clip else {"rtol": 0}
        np.testing.assert_allclose(lean.weights[name], own.weights[name], err_msg=name, **tolerances)
    assert (lean.gradients["spare"] == 0).all()


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_weights_norms_and_skipped_steps_equal_deepspeeds_own(runs, setting) -> None:
    for own, lean in runs[setting]:
        assert_equal_runs(own, lean, clip=setting[2])


def test_one_rank_alone_gives_what_deepspeed_gives() -> None:
    settings = [(1, "bf16", 0.5, 1), (1, "bf16", 0.0, 2)]
    for setting, (own, lean) in zip(settings, run_ranks(1, trainings, settings)[0], strict=True):
        assert_equal_runs(own, lean, clip=setting[2])


def test_the_gradients_of_three_ranks_are_deepspeeds_but_for_the_order_of_their_sum() -> None:
    for ((own, lean),) in run_ranks(3, trainings, SETTINGS[:1]):
        assert lean.applied == own.applied
        for name, gradient in own.gradients.items():
            tolerance = 2**-7 * np.abs(gradient).max()  # of two roundings to bf16
            np.testing.assert_allclose(lean.gradients[name], gradient, rtol=0, atol=tolerance, err_msg=name)


def test_a_step_with_nan_on_one_rank_is_left_out_on_all(runs) -> None:
    for _, lean in runs[(1, "bf16", 0.5, 1)]:
        assert lean.applied == [step != BROKEN_STEP for step in range(4)]
        assert lean.norms[BROKEN_STEP] == float("inf")


def test_stage_1_runs_no_python_for_each_parameter_in_the_backward_pass(runs) -> None:
    for own, lean in runs[(1, "bf16", 0.5, 1)]:
        assert own.hooks > 0 and own.scans > 0 and lean.hooks == 0
        assert lean.leaves_no_gradients and not own.leaves_no_gradients
    for _, lean in runs[(2, "bf16", 0.5, 1)]:
        assert lean.hooks > 0  # which reduces gradients as they come
        assert not lean.leaves_no_gradients


class Operations(TorchDispatchMode):
    """Counts operations that give no mere view."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations_outside_the_model(more: int) -> int:
    """Of one step, from the end of the backward pass on, with so many parameters more."""
    model = make_model()
    model.more = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(8)) for _ in range(more)])
    model.register_forward_hook(lambda _module, _inputs, out: (out[0] + 0 * sum(model.more).sum(), *out[1:]))
    engine = make_engine(model, 4, precision="bf16", gradient_clipping=1.0, timers={"throughput": {"enabled": False}})
    assert make_lean(engine.optimizer)
    loss = ClipLoss(group=engine.data_parallel_group)
    for step in range(2):  # the first one makes the optimizer's state
        batch = make_pairs(4, seed=step)
        output = loss(*engine(batch.images, batch.tokens))
        with Operations() as operations:
            reduce = engine.optimizer.reduce_gradients
            engine.optimizer.reduce_gradients = lambda **options: None
            engine.backward(output.loss)
            operations.count = 0
            engine.optimizer.reduce_gradients = reduce
            reduce()
            engine.step()
    return operations.count


def counts() -> list[int]:
    return [operations_outside_the_model(more) for more in (2, 50)]


def test_the_number_of_operations_does_not_grow_with_the_number_of_parameters() -> None:
    few, many = run_ranks(1, counts)[0]
    assert many == few < 60


def test_another_optimizer_is_left_alone() -> None:
    assert not make_lean(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
