"""When micro batches are taken, and what of the time until they are there counts as the device's waiting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rwkv_clip.training import batches


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The host's time in seconds, which tests move."""
    now = [0.0]
    monkeypatch.setattr(batches.time, "perf_counter", lambda: now[0])
    return now


def test_a_micro_batch_is_taken_when_it_is_asked_for_and_feeding_is_no_waiting(clock) -> None:
    calls = []

    def spend(seconds: float, name: str) -> str:
        calls.append(name)
        clock[0] += seconds
        return name

    loader = SimpleNamespace(accumulation_steps=2, work_ahead=lambda: spend(5.0, "feed"))
    names = ("first", "second", "of the next step")
    idle = batches.IdleClock(torch.device("cpu"))
    taken = batches.MicroBatches(loader, (spend(1.0, name) for name in names), idle)
    assert len(taken) == 2 and not calls
    assert next(iter(taken)) == "first" and calls == ["feed", "first"]
    assert list(taken) == list(taken) == ["first", "second"]
    assert calls == ["feed", "first", "feed", "second"]
    assert idle.seconds() == 2.0 and idle.seconds() == 0.0


class FakeGpu:
    """A device whose work so far ends at `busy_until`; its events are those of torch.cuda."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.busy_until = clock, 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.reached = gpu.busy_until = max(gpu.busy_until, gpu.clock[0])

            def query(self) -> bool:
                return gpu.clock[0] >= self.reached

            def elapsed_time(self, other: Event) -> float:
                return 1000 * (other.reached - self.reached)

        self.Event = Event


def test_only_the_part_of_the_waiting_in_which_a_gpu_has_no_work_counts(clock, monkeypatch) -> None:
    gpu = FakeGpu(clock)
    monkeypatch.setattr(batches.torch.cuda, "Event", gpu.Event)
    idle = batches.IdleClock(torch.device("cuda"))
    for busy, expected in ((3.0, 0.0), (0.75, 0.25), (0.0, 1.0)):
        gpu.busy_until = clock[0] + busy
        with idle.waiting():
            clock[0] += 1.0
        clock[0] += 10.0
        assert idle.seconds() == pytest.approx(expected)


def test_what_a_gpu_has_not_passed_yet_is_told_later(clock, monkeypatch) -> None:
    gpu = FakeGpu(clock)
    monkeypatch.setattr(batches.torch.cuda, "Event", gpu.Event)
    idle = batches.IdleClock(torch.device("cuda"))
    with idle.waiting():
        clock[0] += 1.0
        gpu.busy_until = clock[0] + 2.0  # such as the copy of a batch that is not there yet
    assert idle.seconds() == 0.0
    clock[0] += 2.0
    assert idle.seconds() == pytest.approx(3.0)
