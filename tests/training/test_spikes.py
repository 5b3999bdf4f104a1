"""Which losses count as spikes."""

from __future__ import annotations

import json
import math
import random

from rwkv_clip.training.spikes import FEWEST, WINDOW, LossSpikes


def marked(losses, spikes=None) -> list[int]:
    spikes = spikes or LossSpikes()
    return [step for step, loss in enumerate(losses) if spikes.add(loss)]


def noisy(count: int, level=lambda step: 2.0, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [level(step) + generator.gauss(0, 0.05) for step in range(count)]


def test_a_falling_noisy_loss_has_none():
    assert marked(noisy(2000, lambda step: 1 + 6 * math.exp(-step / 300))) == []


def test_a_step_that_jumps_out_is_marked_and_those_after_it_are_not():
    losses = noisy(300)
    losses[200] = 2.6
    assert marked(losses) == [200]


def test_a_quiet_loss_may_move_by_a_few_percent():
    losses = [6.9] * 100 + [7.1] + [6.9] * 20 + [7.5]
    assert marked(losses) == [121]


def test_nothing_stands_out_at_the_start():
    losses = [2.0] * (FEWEST - 1) + [9.0]
    assert marked(losses) == []
    assert marked([2.0] * FEWEST + [9.0]) == [FEWEST]


def test_a_level_that_lasts_is_the_new_normal_after_half_a_window():
    losses = noisy(300) + noisy(300, lambda step: 4.0)
    steps = marked(losses)
    assert steps[0] == 300 and WINDOW // 2 - 3 <= len(steps) <= WINDOW // 2 + 3


def test_losses_that_are_not_finite_are_passed_over():
    losses = noisy(200)
    losses[100:110] = [math.nan, math.inf] * 5
    assert marked(losses) == []


def test_what_a_checkpoint_keeps_goes_on_as_if_nothing_had_happened():
    losses = noisy(400)
    losses[150], losses[350] = 3.0, 3.0
    spikes = LossSpikes()
    first = marked(losses[:200], spikes)
    again = LossSpikes(json.loads(json.dumps(spikes.state())))
    assert first == [150] and marked(losses[200:], again) == [150]
    assert again.count == 2


def test_the_line_names_the_loss_and_the_median():
    spikes = LossSpikes()
    for _ in range(FEWEST):
        spikes.add(2.0)
    assert spikes.add(4.5) == "4.5000, where the last 32 steps have a median of 2.0000"
