"""Learning-rate factors by optimizer step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rwkv_clip.errors import UserError
from rwkv_clip.training.schedule import SCHEDULES, lr_lambda, warmup_steps


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_rises_in_equal_steps_to_the_peak(name):
    factor = lr_lambda(name, total_steps=100, warmup_steps=10)
    assert [factor(step) for step in range(10)] == pytest.approx([0.1 * (step + 1) for step in range(10)])


@pytest.mark.parametrize("name", ["cosine", "linear"])
@given(total=st.integers(2, 500), warmup=st.floats(0, 0.9), minimum=st.floats(0, 1))
def test_O7_the_last_step_and_any_beyond_have_the_minimum(name, total, warmup, minimum):
    steps = warmup_steps(warmup, total)
    factor = lr_lambda(name, total, min(steps, total - 1), minimum)
    assert factor(total - 1) == pytest.approx(minimum, abs=1e-12)
    assert factor(total) == factor(total + 5) == pytest.approx(minimum, abs=1e-12)
    after_peak = [factor(step) for step in range(min(steps, total - 1), total)]
    assert all(later <= earlier + 1e-12 for earlier, later in zip(after_peak, after_peak[1:], strict=False))
    assert all(0 <= factor(step) <= 1 + 1e-12 for step in range(total))


def test_cosine_and_linear_are_half_way_down_half_way_through():
    assert lr_lambda("cosine", 101, 0, 0.2)(50) == pytest.approx(0.6)
    assert lr_lambda("linear", 101, 0, 0.2)(50) == pytest.approx(0.6)
    assert lr_lambda("cosine", 101, 0)(25) == pytest.approx(0.853553, abs=1e-6)
    assert lr_lambda("linear", 101, 0)(25) == pytest.approx(0.75)


def test_step_falls_at_its_milestones_and_constant_never():
    factor = lr_lambda("step", 100, 10, milestones=(0.5, 0.8), gamma=0.1)
    assert [factor(step) for step in (10, 49, 50, 79, 80, 99, 100)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.01])
    assert {lr_lambda("constant", 100, 10)(step) for step in range(9, 120)} == {1.0}


def test_a_run_of_one_step_uses_the_peak_rate():
    assert lr_lambda("cosine", 1, 0)(0) == 1.0
    assert lr_lambda("linear", 1, 1)(0) == 1.0


def test_torch_takes_the_factor_and_every_group_keeps_its_own_peak():
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda("cosine", 4, 2))
    used = []
    for _ in range(4):
        used.append(scheduler.get_last_lr())
        optimizer.step()
        scheduler.step()
    assert [rates[0] for rates in used] == pytest.approx([0.5, 1.0, 0.5, 0.0])
    assert [rates[1] for rates in used] == pytest.approx([0.05, 0.1, 0.05, 0.0])


def test_a_warm_up_is_a_share_of_the_run_below_one_and_steps_otherwise():
    assert warmup_steps(0.1, 1000) == 100
    assert warmup_steps(2000, 10000) == 2000
    assert warmup_steps(0, 10) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cosin", 10, 1), "'cosin'.*cosine, linear, step, constant"),
        (("cosine", 10, 11), "11 steps.*10"),
        (("cosine", 0, 0), "at least one.*0"),
        (("cosine", 10, 1, 1.5), "1.5"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        lr_lambda(*arguments)
