"""Saves that are written while training goes on: what they hold, when they show, and how their failures are heard."""

from __future__ import annotations

import collections
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from test_distributed import on_ranks

from rwkv_clip.errors import UserError
from rwkv_clip.training import background
from rwkv_clip.training.checkpoint import Checkpoints, Position
from rwkv_clip.training.distributed import CommonError, World
from rwkv_clip.training.launcher import Place
from rwkv_clip.training.resume import complete_checkpoints
from rwkv_clip.training.snapshot import on_host

MODEL = "mp_rank_00_model_states.pt"


class Engine:
    """DeepSpeed's way of saving, for one tensor that training changes in place."""

    def __init__(self, rank: int = 0):
        self.name = MODEL if rank == 0 else f"rank_{rank}.pt"
        self.weights = torch.zeros(3)
        self.checkpoint_engine = None

    def save_checkpoint(self, folder, tag, save_latest):
        self.checkpoint_engine.save({"weights": self.weights}, f"{folder}/{tag}/{self.name}")


def alone() -> World:
    return World(Place("alone", 0, 1, 0, 1, "127.0.0.1", 0), torch.device("cpu"), None, ["here"])


@pytest.fixture
def gate(monkeypatch):
    """Holds the writer back until it is set."""
    opened, write = threading.Event(), background._write

    def held_back(path, content):
        assert opened.wait(20)
        return write(path, content)

    monkeypatch.setattr(background, "_write", held_back)
    return opened


def test_a_save_holds_the_weights_of_its_step_and_shows_when_it_is_written(tmp_path, gate):
    engine, checkpoints = Engine(), Checkpoints(alone(), tmp_path, 3, None)
    checkpoints.save(engine, Position(1), {"world_size": 1}, {})
    engine.weights += 1  # the next step
    assert complete_checkpoints(tmp_path) == []
    gate.set()
    checkpoints.finish()
    saved = torch.load(tmp_path / "step_00000001" / MODEL)
    assert torch.equal(saved["weights"], torch.zeros(3))


def test_the_next_save_waits_for_the_one_before(tmp_path, gate):
    engine, checkpoints = Engine(), Checkpoints(alone(), tmp_path, 3, None)
    checkpoints.save(engine, Position(1), {"world_size": 1}, {})
    threading.Timer(0.2, gate.set).start()
    checkpoints.save(engine, Position(2), {"world_size": 1}, {})
    assert [path.name for path in complete_checkpoints(tmp_path)][-1] == "step_00000001"
    checkpoints.finish()
    assert len(complete_checkpoints(tmp_path)) == 2


def test_a_disk_that_fills_up_meanwhile_is_known_before_the_next_save_and_costs_no_older_one(tmp_path, monkeypatch):
    engine, checkpoints = Engine(), Checkpoints(alone(), tmp_path, 3, None)
    checkpoints.save(engine, Position(1), {"world_size": 1}, {})
    checkpoints.finish()
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    checkpoints.save(engine, Position(2), {"world_size": 1}, {})
    checkpoints._writer._thread.join()
    assert checkpoints.has_failed
    with pytest.raises(UserError, match=r"cannot write the checkpoint .*step_00000002.*No space left.* MiB free\)$"):
        checkpoints.save(engine, Position(3), {"world_size": 1}, {})
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_00000001"]


def test_a_rank_that_cannot_write_ends_all_with_its_line_and_nothing_shows(tmp_path, monkeypatch):
    write = background._write

    def fail_on_one(path, content):
        if path.name == "rank_00001.pt":
            raise UserError("cannot write the checkpoint: No space left")
        return write(path, content)

    monkeypatch.setattr(background, "_write", fail_on_one)

    def save(world):
        checkpoints = Checkpoints(world, tmp_path, 3, None)
        checkpoints.save(Engine(world.rank), Position(1), {"world_size": 2}, {})
        checkpoints.finish()

    results = on_ranks(save)
    assert all(isinstance(error, CommonError) for error in results.values()), results
    assert len({str(error) for error in results.values()}) == 1 and "rank 1" in str(results[0])
    assert complete_checkpoints(tmp_path) == []


def test_a_save_of_two_ranks_lists_the_files_of_both(tmp_path):
    def save(world):
        checkpoints = Checkpoints(world, tmp_path, 3, None)
        checkpoints.save(Engine(world.rank), Position(1), {"world_size": 2}, {})
        checkpoints.finish()
        return True

    assert on_ranks(save) == {0: True, 1: True}
    (path,) = complete_checkpoints(tmp_path)
    assert {MODEL, "rank_1.pt", "rank_00000.pt", "rank_00001.pt"} <= {file.name for file in path.iterdir()}


@pytest.fixture
def unwritable():
    """A folder that this user may read only; root gives its rights up meanwhile."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield folder
    if is_root:
        os.seteuid(0)
    shutil.rmtree(folder)


def test_a_folder_that_became_read_only_is_one_line(unwritable):
    with pytest.raises(UserError, match=r"cannot write the checkpoint .*step_00000001.*Permission denied"):
        Checkpoints(alone(), unwritable, 3, None).save(Engine(), Position(1), {"world_size": 1}, {})


def test_a_copy_on_the_host_is_equal_and_apart():
    inner = torch.arange(6.0)
    value = {"list": [inner[2:4], (1, "x")], "ordered": collections.OrderedDict(b=inner, a=None), 3: torch.Size([2])}
    copied = on_host(value)
    inner += 1
    assert copied["list"][0].tolist() == [2, 3] and copied["list"][1] == (1, "x") and copied[3] == torch.Size([2])
    assert list(copied["ordered"]) == ["b", "a"] and copied["ordered"]["b"].tolist() == [0, 1, 2, 3, 4, 5]
    assert copied["list"][0].untyped_storage().nbytes() == 8
