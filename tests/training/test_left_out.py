"""Rows of steps that were left out: their length, their beginning, and a resume within one."""

from __future__ import annotations

import json

import pytest
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from rwkv_clip.training.distributed import CommonError
from rwkv_clip.training.left_out import LeftOutSteps, scale_errors, share_left_out


def test_a_row_is_counted_from_its_first_step_and_ends_with_a_step_that_was_applied() -> None:
    left_out = LeftOutSteps()
    assert left_out.in_row == 0 and 0 not in left_out and 1 not in left_out
    for step in (4, 5, 6):
        left_out.add(step, epoch=2, first_records=[step])
    assert (left_out.in_row, left_out.first_step, left_out.epoch, left_out.first_records) == (3, 4, 2, [4])
    left_out.add(8, epoch=3, first_records=[8])
    assert (left_out.in_row, left_out.first_step, left_out.epoch, left_out.first_records) == (1, 8, 3, [8])
    assert [step for step in range(10) if step in left_out] == [4, 5, 6, 8]


@pytest.mark.parametrize(("next_step", "row", "first"), [(7, 3, 5), (8, 1, 8)])
def test_a_row_goes_on_after_a_resume_unless_a_step_was_applied_in_between(next_step, row, first) -> None:
    before = LeftOutSteps()
    before.add(5, epoch=1, first_records=[50, 51])
    before.add(6, epoch=2, first_records=[60])
    after = LeftOutSteps(json.loads(json.dumps(before.state())))
    assert 6 in after and after.in_row == 2
    after.add(next_step, epoch=2, first_records=[70])
    assert (after.in_row, after.first_step) == (row, first)
    assert after.first_records == ([50, 51] if row == 3 else [70])


def test_the_share_of_left_out_steps_is_told_if_there_were_any() -> None:
    assert share_left_out(0, 100) is None
    assert share_left_out(7, 8).startswith("7 of the run's 8 steps (87.5 %) were left out")
    assert "(0.05 %)" in share_left_out(1, 2000) and "(100 %)" in share_left_out(8, 8)


def test_the_smallest_loss_scale_is_one_line_and_other_errors_pass() -> None:
    scaler = DynamicLossScaler(1.0, 1000, 1.0, 1, consecutive_hysteresis=False)
    with pytest.raises(CommonError, match=r"^step 7: .* fp16 .* train in bf16"), scale_errors(7):
        scaler.update_scale(overflow=True)
    with pytest.raises(ZeroDivisionError), scale_errors(7):
        raise ZeroDivisionError
