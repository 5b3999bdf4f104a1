"""--profile START:STOP: which steps are traced, and that the trace is a file that viewers open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rwkv_clip.errors import UserError
from rwkv_clip.training.arguments import parse_arguments
from rwkv_clip.training.profile import StepProfiler

REQUIRED = ["--model", "m", "--train-data", "d", "--output", "o"]


def run_steps(profiler: StepProfiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        profiler.before(step)
        with torch.profiler.record_function(f"step_{step}"):
            torch.ones(4).sum()
        profiler.after(step)


def traced_steps(folder: Path) -> set[str]:
    (path,) = folder.iterdir()
    assert path.name.endswith(".pt.trace.json")  # what TensorBoard's plugin looks for
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("step_")}


def test_the_steps_of_the_range_are_traced(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    run_steps(StepProfiler((3, 5), folder, torch.device("cpu")), 1, 7)
    assert traced_steps(folder) == {"step_3", "step_4"}


def test_a_run_that_ends_within_the_range_leaves_its_trace(tmp_path: Path) -> None:
    profiler = StepProfiler((3, 50), tmp_path, torch.device("cpu"))
    run_steps(profiler, 1, 4)
    profiler.close()
    profiler.close()
    assert traced_steps(tmp_path) == {"step_3", "step_4"}


@pytest.mark.parametrize("steps", [None, (3, 5)])
def test_nothing_is_traced_unasked_or_after_the_range(tmp_path: Path, steps) -> None:
    profiler = StepProfiler(steps, tmp_path, torch.device("cpu"))
    run_steps(profiler, 6, 8)
    profiler.close()
    assert not list(tmp_path.iterdir())


def test_the_flag_gives_two_numbers() -> None:
    assert parse_arguments([*REQUIRED, "--profile", "20:25"]).profile == (20, 25)
    assert parse_arguments(REQUIRED).profile is None


@pytest.mark.parametrize("text", ["20", "20:", "25:20", "20:20", "0:5", "a:b", "-1:4"])
def test_a_wrong_range_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(UserError, match=f"--profile.* expected START:STOP.*found '{text}'"):
        parse_arguments([*REQUIRED, f"--profile={text}"])
