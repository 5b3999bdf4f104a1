"""Real engines saved and loaded: other numbers of ranks, damaged files, and processes killed while they save."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import free_port, run_ranks, start_rank
from test_distributed import on_ranks
from tiny import make_engine, make_model, make_pairs, micro_batches

from rwkv_clip.errors import UserError
from rwkv_clip.training.checkpoint import Checkpoints, Position
from rwkv_clip.training.distributed import CommonError, World, meet
from rwkv_clip.training.launcher import Place
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.masters import master_parts, set_masters, sync_precise
from rwkv_clip.training.resume import find_checkpoint
from rwkv_clip.training.step import train_step
from rwkv_clip.training.weights import whole_weight

PAIRS = 12
VARIANTS = [(stage, precision) for stage in (1, 2) for precision in ("fp32", "bf16")]


def make_world(port: int) -> World:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Place("variables", rank, size, rank, size, "127.0.0.1", port)
    return meet(place, torch.device("cpu"), 60, "checkpoints")


def alone() -> World:
    return World(Place("alone", 0, 1, 0, 1, "127.0.0.1", 0), torch.device("cpu"), None, ["here"])


def start(stage: int, precision: str, world_size: int, accumulation: int):
    model = make_model()
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    micro = PAIRS // world_size // accumulation
    engine = make_engine(model, micro, accumulation, stage, precision, schedule=lambda step: 1 / (1 + step))
    set_masters(engine, exact)
    return engine


def step(engine, number: int) -> float:
    """One optimizer step on the global batch of that number, the same at any number of ranks."""
    rank, size = engine.global_rank, engine.dp_world_size
    batches = micro_batches(make_pairs(PAIRS, seed=number), rank, size, engine.gradient_accumulation_steps())
    return train_step(engine, batches, ClipLoss(group=engine.data_parallel_group)).loss.item()


def whole_state(engine) -> dict[str, np.ndarray]:
    """Every master and both moments, whole, by name."""
    parts, found = master_parts(engine), {}
    for name, parameter in engine.module.named_parameters():
        part = parts.get(name)
        moments = engine.basic_optimizer.state[part.owner] if part else {}
        values = {"": part.value} if part else {}
        values |= {key: part.view(moments[key]) for key in ("exp_avg", "exp_avg_sq") if part}
        for key in ("", "exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = whole_weight(engine, parameter, part, values.get(key)).numpy().copy()
    return found


def save_all(folder: str, port: int, accumulation: int) -> list:
    """Three steps, a save, two more steps; (state when saved, losses after it) of each variant."""
    world, results = make_world(port), []
    for stage, precision in VARIANTS:
        engine = start(stage, precision, world.world_size, accumulation)
        path = Path(folder) / f"{stage}_{precision}"
        if world.is_first:
            path.mkdir()
        world.wait()
        checkpoints = Checkpoints(world, path, 3, None)
        for number in range(3):
            step(engine, number)
        checkpoints.save(engine, Position(3, 0, 3 * PAIRS), {"world_size": world.world_size}, {})
        saved = whole_state(engine)
        losses = [step(engine, number) for number in (3, 4)]  # while it is being written
        checkpoints.finish()
        results.append((saved, losses))
    world.leave()
    return results


def load_all(folder: str, port: int, accumulation: int) -> list:
    """(state as loaded, losses of the next two steps) of each variant."""
    world, results = make_world(port), []
    for stage, precision in VARIANTS:
        engine = start(stage, precision, world.world_size, accumulation)
        path, state = find_checkpoint("auto", Path(folder) / f"{stage}_{precision}", world)
        Checkpoints(world, path.parent, 3, None).load(engine, path, state)
        sync_precise(engine)
        loaded = whole_state(engine)
        results.append((loaded, [step(engine, number) for number in (3, 4)]))
        world.wait()
        assert not list(path.parent.glob("*universal*"))
    world.leave()
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """ranks -> (folder, results of rank 0); the single rank saves in the middle of an epoch of accumulated steps."""
    made = {}
    for ranks, accumulation in ((1, 2), (2, 1)):
        folder = tmp_path_factory.mktemp(f"saved_by_{ranks}")
        made[ranks] = folder, run_ranks(ranks, save_all, str(folder), free_port(), accumulation)[0]
    return made


@pytest.mark.parametrize(("before", "after", "accumulation"), [(2, 1, 3), (1, 2, 2), (2, 3, 2), (2, 2, 1)])
def test_C3_masters_moments_and_losses_go_on_at_another_number_of_ranks(saved, before, after, accumulation):
    folder, expected = saved[before]
    results = run_ranks(after, load_all, str(folder), free_port(), accumulation)
    for rank in range(after):
        for variant, (state, losses), (loaded, losses_after) in zip(VARIANTS, expected, results[rank], strict=True):
            assert state.keys() == loaded.keys()
            for name, value in state.items():
                # A whole one has no padding, so what every rank puts together must be the same to the bit.
                np.testing.assert_array_equal(loaded[name], value, err_msg=f"{name} {variant}")
            exact = before == after
            assert losses_after == pytest.approx(losses, abs=0 if exact else 1e-5 if variant[1] == "fp32" else 2e-2)


def load_damaged(folder: str, names: list[str]) -> list[str]:
    """What loading says when each of these files in turn holds other bytes of the same number."""
    world = alone()
    words = []
    for name in names:
        engine = start(1, "fp32", 1, 2)
        path, state = find_checkpoint("auto", Path(folder) / "1_fp32", world)
        whole = (path / name).read_bytes()
        (path / name).write_bytes(bytes(len(whole)))
        try:
            Checkpoints(world, path.parent, 3, None).load(engine, path, state)
            words.append("loaded")
        except UserError as error:
            words.append(str(error))
        (path / name).write_bytes(whole)
    return words


def test_a_file_with_other_bytes_is_refused_in_a_line_that_names_the_checkpoint(saved):
    folder, _ = saved[1]
    state = json.loads((folder / "1_fp32" / "step_00000003" / "state.json").read_text())
    names = sorted(state["files"])
    assert len(names) == 3
    for name, words in zip(names, run_ranks(1, load_damaged, str(folder), names)[0], strict=True):
        assert "cannot load the checkpoint" in words and "step_00000003" in words and "\n" not in words, (name, words)


@pytest.mark.parametrize("variant", ["1_bf16", "2_fp32"])
def test_one_flipped_bit_in_any_file_of_two_ranks_is_found_before_anything_is_loaded(saved, variant):
    path = saved[2][0] / variant / "step_00000003"
    names = sorted(json.loads((path / "state.json").read_text())["files"])
    assert len(names) == 5  # the model, and of each rank its part of the optimizer's state and its random state
    for name in names:
        whole = (path / name).read_bytes()
        middle = len(whole) // 2
        (path / name).write_bytes(whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :])
        errors = on_ranks(lambda world: find_checkpoint(str(path), path.parent, world))
        (path / name).write_bytes(whole)
        for error in errors.values():
            assert isinstance(error, CommonError) and f"{name} is damaged" in str(error), (name, errors)
    assert on_ranks(lambda world: find_checkpoint(str(path), path.parent, world)[0]) == {0: path, 1: path}


def save_loop(folder: str, last: int) -> dict[str, np.ndarray]:
    """Goes on from the newest save and saves each step until the last; the state at the end."""
    world = alone()
    path = Path(folder)
    engine = start(1, "fp32", 1, 1)
    checkpoints = Checkpoints(world, path, 2, 5)
    found, done = find_checkpoint("auto", path, world), 0
    checkpoints.prepare(found[0] if found else None)
    if found:
        checkpoints.load(engine, *found)
        done = found[1]["position"]["step"]
    for number in range(done, last):
        step(engine, number)
        checkpoints.save(engine, Position(number + 1, 0, 0), {"world_size": 1}, {})
    checkpoints.finish()
    return whole_state(engine)


def test_C5_a_save_loop_killed_at_ten_random_moments_always_goes_on_from_a_complete_save(tmp_path):
    moments = random.Random(5)
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    killed.mkdir(), straight.mkdir()
    reached = 0
    for _ in range(10):
        process = start_rank(save_loop, str(killed), 10**6)
        deadline = time.monotonic() + 60
        while newest(killed) <= reached and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.join()
        assert newest(killed) > reached
        reached = newest(killed)
        path, state = find_checkpoint("auto", killed, alone())
        assert path.name == f"step_{reached:08d}" and state["position"]["step"] == reached
    last = reached + 1
    expected, found = (run_ranks(1, save_loop, str(folder), last)[0] for folder in (straight, killed))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    kept = {step for step in range(5, last - 1, 5)} | {last - 1, last}
    assert {path.name for path in killed.glob("step_*")} == {f"step_{step:08d}" for step in kept}


def newest(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("step_????????")), default=0)
