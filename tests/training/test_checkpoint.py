import json
import shutil

import pytest
import torch

from rwkv_clip.errors import UserError
from rwkv_clip.model.checksum import STATE
from rwkv_clip.training.checkpoint import Checkpoints, Position
from rwkv_clip.training.distributed import World
from rwkv_clip.training.launcher import Place
from rwkv_clip.training.resume import checkpoint_name, complete_checkpoints, find_checkpoint, verify


class FakeEngine:
    """Saves as DeepSpeed does: files in a folder of the tag, through its checkpoint engine."""

    def __init__(self, fail: Exception | None = None):
        self.fail = fail
        self.checkpoint_engine = None

    def save_checkpoint(self, folder, tag, save_latest):
        self.checkpoint_engine.save({"weights": torch.ones(3)}, f"{folder}/{tag}/mp_rank_00_model_states.pt")
        if self.fail:
            raise self.fail
        path = f"{folder}/{tag}/zero_pp_rank_0_mp_rank_00_optim_states.pt"
        self.checkpoint_engine.save({"moments": torch.ones(3)}, path)


@pytest.fixture
def world():
    return World(Place("alone", 0, 1, 0, 1, "127.0.0.1", 0), torch.device("cpu"), None, ["here"])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def save(world, folder, *steps, keep_last=100, keep_every=None, engine=None):
    checkpoints = Checkpoints(world, folder, keep_last, keep_every)
    for step in steps:
        checkpoints.save(engine or FakeEngine(), Position(step, 0, step * 4), {"world_size": 1}, {})
    checkpoints.finish()
    return checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_save_stands_under_its_final_name_with_position_and_files(world, folder):
    save(world, folder, 7)
    state = verify(folder / checkpoint_name(7))
    assert state["position"] == {"step": 7, "epoch": 0, "samples": 28} and state["world_size"] == 1
    assert set(state["files"]) == {
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "rank_00000.pt",
    }
    assert names(folder) == ["latest", "step_00000007"]
    assert (folder / "latest").read_text() == "step_00000007"


def test_C8_a_save_that_fails_leaves_the_old_one_and_is_not_selected(world, folder):
    save(world, folder, 3)
    with pytest.raises(UserError, match="cannot write the checkpoint .*No space left"):
        save(world, folder, 6, engine=FakeEngine(OSError(28, "No space left on device")))
    path, _ = find_checkpoint("auto", folder, world)
    assert path.name == "step_00000003"
    Checkpoints(world, folder, 3, None).prepare(path)
    assert names(folder) == ["latest", "step_00000003"]


def test_a_save_is_refused_beforehand_when_the_last_one_would_not_fit(world, folder, monkeypatch):
    checkpoints = save(world, folder, 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(UserError, match="no room for a checkpoint"):
        checkpoints.save(FakeEngine(), Position(6, 0, 24), {"world_size": 1}, {})
    assert names(folder) == ["latest", "step_00000003"]


def test_old_saves_are_thinned_out(world, folder):
    save(world, folder, 2, 4, 5, 6, 8, 9, keep_last=2, keep_every=4)
    assert names(folder) == ["latest", "step_00000004", "step_00000008", "step_00000009"]


def damage_missing(path):
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()


def damage_short(path):
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"mo")


def damage_no_state(path):
    (path / STATE).unlink()


def damage_cut_state(path):
    (path / STATE).write_text((path / STATE).read_text()[:40])


def damage_edited_state(path):
    (path / STATE).write_text((path / STATE).read_text().replace('"step": 6', '"step": 60'))


def damage_other_state(path):
    (path / STATE).write_text('["step_00000006"]')


def damage_binary_state(path):
    (path / STATE).write_bytes(bytes(range(256)))


def damage_state_is_a_folder(path):
    (path / STATE).unlink()
    (path / STATE).mkdir()


DAMAGES = [damage_missing, damage_short, damage_no_state, damage_cut_state]
DAMAGES += [damage_edited_state, damage_other_state, damage_binary_state, damage_state_is_a_folder]


@pytest.mark.parametrize("damage", DAMAGES)
def test_C5_a_broken_newest_save_is_passed_over(world, folder, damage):
    save(world, folder, 3, 6)
    damage(folder / checkpoint_name(6))
    path, state = find_checkpoint("auto", folder, world)
    assert path.name == "step_00000003" and state["position"]["step"] == 3
    with pytest.raises(UserError, match="step_00000006") as caught:
        find_checkpoint(str(folder / checkpoint_name(6)), folder, world)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("latest", [b"", b"step_00000099", b"\xff\xfe", None])
def test_the_newest_complete_save_is_used_with_a_warning_whatever_latest_says(world, folder, latest, caplog):
    save(world, folder, 3, 6)
    (folder / "latest").unlink() if latest is None else (folder / "latest").write_bytes(latest)
    caplog.set_level("WARNING", "rwkv_clip")
    assert find_checkpoint("auto", folder, world)[0].name == "step_00000006"
    assert "going on from the newest complete checkpoint, step_00000006" in caplog.text


def test_C7_only_auto_may_start_afresh(world, folder, tmp_path):
    assert find_checkpoint("auto", folder, world) is None
    assert find_checkpoint("auto", tmp_path / "no_such", world) is None
    for path in (tmp_path / "no_such", folder, tmp_path):
        with pytest.raises(UserError, match="--resume"):
            find_checkpoint(str(path), folder, world)


def test_saves_that_are_all_broken_never_start_afresh(world, folder):
    save(world, folder, 3)
    damage_missing(folder / checkpoint_name(3))
    with pytest.raises(UserError, match="none of the 1 checkpoints"):
        find_checkpoint("auto", folder, world)


def test_a_run_folder_its_checkpoints_and_one_checkpoint_are_all_taken(world, folder, tmp_path):
    save(world, folder, 3, 6)
    for path, step in ((tmp_path, 6), (folder, 6), (folder / checkpoint_name(3), 3)):
        assert find_checkpoint(str(path), tmp_path / "other", world)[1]["position"]["step"] == step


def test_going_back_sets_newer_saves_aside(world, folder):
    checkpoints = save(world, folder, 3, 6)
    checkpoints.prepare(folder / checkpoint_name(3))
    assert names(folder) == ["latest", "step_00000003", "step_00000006.set_aside"]
    assert [path.name for path in complete_checkpoints(folder)] == ["step_00000003"]


@pytest.mark.parametrize("other", [2, 99])
def test_a_save_of_another_format_is_refused_with_two_ways_on(other, world, folder):
    save(world, folder, 3)
    checkpoint = folder / checkpoint_name(3)
    path = checkpoint / STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": other}))
    with pytest.raises(UserError, match=f"format {other}, expected") as refusal:
        verify(checkpoint)
    message = str(refusal.value)
    assert "go on with that version" in message and f"--pretrained {checkpoint}" in message and "\n" not in message
