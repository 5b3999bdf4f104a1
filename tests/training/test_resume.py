"""Files of a save that hold other bytes than were written, though as many: found by the ranks that read them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_distributed import on_ranks

from rwkv_clip.errors import UserError
from rwkv_clip.model import checksum
from rwkv_clip.training import resume
from rwkv_clip.training.checkpoint import Checkpoints, Position
from rwkv_clip.training.distributed import CommonError, World
from rwkv_clip.training.launcher import Place
from rwkv_clip.training.resume import STATE, find_checkpoint, is_read_by, state_checksum

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
RANDOM = ["rank_00000.pt", "rank_00001.pt"]
AVERAGE = ["ema_00000.pt", "ema_00001.pt"]
FILES = [MODEL, *OPTIMIZER, *RANDOM, *AVERAGE, "frozen.pt"]


class Engine:
    """Saves the files that DeepSpeed does on a rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.checkpoint_engine = None

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        for name in [MODEL] * (self.rank == 0) + [OPTIMIZER[self.rank]]:
            self.checkpoint_engine.save({"values": torch.ones(99)}, f"{folder}/{tag}/{name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Saves of steps 3 and 6, written by two ranks, with every kind of file."""

    def save(world: World) -> None:
        checkpoints = Checkpoints(world, tmp_path, 9, None)
        average = SimpleNamespace(shard=lambda: {"updates": 1, "parts": {}})
        for step in (3, 6):
            frozen = {"a": torch.ones(3)}
            checkpoints.save(Engine(world.rank), Position(step), {"world_size": 2}, frozen, average)
        checkpoints.finish()

    assert on_ranks(save) == {0: None, 1: None}
    return tmp_path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def found(how: str, folder: Path, ranks: int = 2) -> dict:
    """By rank the step to go on from, or the error."""

    def find(world: World) -> int:
        return find_checkpoint(how, folder, world)[1]["position"]["step"]

    if ranks == 1:
        world = World(Place("alone", 0, 1, 0, 1, "127.0.0.1", 0), torch.device("cpu"), None, ["here"])
        return {0: find(world)}
    return on_ranks(find)


def test_a_save_keeps_a_checksum_of_each_of_its_files(folder: Path) -> None:
    state = json.loads((folder / "step_00000006" / STATE).read_text())
    assert set(state["crc32"]) == set(state["files"]) == set(FILES)
    for name, value in state["crc32"].items():
        assert checksum.checksum(folder / "step_00000006" / name) == value
    assert found("auto", folder) == {0: 6, 1: 6}


@pytest.mark.parametrize("name", FILES)
def test_a_save_with_one_flipped_bit_is_passed_over_and_refused_when_it_is_named(name, folder, caplog) -> None:
    flip(folder / "step_00000006" / name)
    caplog.set_level("WARNING", "rwkv_clip")
    assert found("auto", folder) == {0: 3, 1: 3}
    assert [record.message for record in caplog.records if "passing over a broken checkpoint" in record.message]
    assert f"step_00000006/{name} is damaged" in caplog.text
    errors = found(str(folder / "step_00000006"), folder)
    assert all(isinstance(error, CommonError) for error in errors.values()) and str(errors[0]) == str(errors[1])
    assert f"step_00000006/{name} is damaged: " in str(errors[0]) and "\n" not in str(errors[0])
    assert str(errors[0]).endswith("use an earlier checkpoint")


def test_damaged_saves_alone_never_start_afresh(folder: Path) -> None:
    flip(folder / "step_00000003" / RANDOM[1])
    flip(folder / "step_00000006" / MODEL)
    for error in found("auto", folder).values():
        assert isinstance(error, CommonError) and str(error).startswith("none of the 2 checkpoints")


def test_a_save_without_checksums_is_taken_as_it_is_and_a_line_says_so(folder: Path, caplog) -> None:
    for step in (3, 6):
        path = folder / f"step_0000000{step}" / STATE
        state = json.loads(path.read_text())
        head = {"format": state.pop("format"), "checksum": state.pop("checksum")}
        del state["crc32"]
        path.write_text(json.dumps(head | {"checksum": state_checksum(state)} | state))
    flip(folder / "step_00000006" / MODEL)
    caplog.set_level("INFO", "rwkv_clip")
    assert found("auto", folder) == {0: 6, 1: 6}
    assert "kept no checksums: the bytes of its files are not checked" in caplog.text


def test_each_rank_looks_at_the_files_that_it_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(resume, "check", lambda path, _: read.append(path.name))
    common = [MODEL, *AVERAGE, "frozen.pt"]
    found("auto", folder)
    assert sorted(read) == sorted([*common, *common, *OPTIMIZER, *RANDOM])
    read.clear()
    found("auto", folder, ranks=1)  # which divides both ranks' states anew
    assert sorted(read) == sorted([*common, *OPTIMIZER])


def test_whose_files_are_whose() -> None:
    assert is_read_by(12, "zero_pp_rank_12_mp_rank_00_optim_states.pt", True)
    assert not is_read_by(1, "zero_pp_rank_12_mp_rank_00_optim_states.pt", True)
    assert not is_read_by(0, "rank_00001.pt", True) and not is_read_by(0, "rank_00000.pt", False)
    divided = "zero_pp_rank_1_mp_rank_00_model_states.pt"  # of ZeRO stage 3
    assert is_read_by(1, divided, True) and not is_read_by(0, divided, True) and is_read_by(0, divided, False)
    assert not is_read_by(1, OPTIMIZER[1], False) and is_read_by(0, OPTIMIZER[1], False)
    assert all(is_read_by(7, name, same) for name in (MODEL, *AVERAGE, "frozen.pt", "other") for same in (True, False))


def test_a_file_that_the_disk_does_not_give_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checksum.checksum

    def fail(path: Path) -> str:
        if path.parent.name == "step_00000006" and path.name == OPTIMIZER[1]:
            raise OSError(5, "Input/output error")
        return whole(path)

    monkeypatch.setattr(checksum, "checksum", fail)
    assert found("auto", folder) == {0: 3, 1: 3}
    error = found(str(folder / "step_00000006"), folder)[1]
    assert isinstance(error, UserError) and "rank 1" in str(error) and "(Input/output error)" in str(error)
