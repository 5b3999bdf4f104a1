"""Checkpoints of bf16 engines that loaded published weights give every value back, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from save_checkpoints import ENGINES

from rwkv_clip import create_model
from rwkv_clip.cli import main
from rwkv_clip.model.checksum import CHECKSUMS, STATE, checksum
from rwkv_clip.model.published import read_state_dict

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run per engine, saved by two ranks."""
    pytest.importorskip("deepspeed")
    out = tmp_path_factory.mktemp("runs")
    weights = fixtures / "ckpt"
    script = [Path(__file__).parent / "save_checkpoints.py", weights / "tiny_config.json", weights / "tiny_ref.pt", out]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, *map(str, script)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stderr[-3000:]
    return out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_untouched_bf16_engine_exports_the_loaded_weights_bit_equal(
    runs: Path, fixtures: Path, tmp_path: Path, engine: str, suffix: str
) -> None:
    out = tmp_path / f"export{suffix}"
    assert main(["export", str(runs / engine), str(out)]) == 0
    original, exported = read_state_dict(fixtures / "ckpt" / "tiny_ref.pt"), read_state_dict(out)
    assert exported.keys() == original.keys()
    for name, value in original.items():
        assert exported[name].dtype == torch.float32 and exported[name].shape == value.shape, name
        assert torch.equal(exported[name], value.float()), name


def test_averaged_weights_are_exported_and_loaded_or_missed(
    runs: Path, fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "averaged.pt"
    assert main(["export", str(runs / "locked"), str(out), "--ema"]) == 0
    original, exported = read_state_dict(fixtures / "ckpt" / "tiny_ref.pt"), read_state_dict(out)
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], value.float()) for name, value in original.items())  # no step was taken
    model = create_model(fixtures / "ckpt" / "tiny_config.json", checkpoint=runs / "locked", ema=True)
    assert torch.equal(model.logit_scale.view(()), exported["logit_scale"])
    for source, reason in ((runs / "zero1", "without --ema-decay"), (out, "is a file")):
        assert main(["export", str(source), str(tmp_path / "none.pt"), "--ema"]) == 2
        assert reason in capsys.readouterr().err


def test_a_checkpoint_folder_may_be_named_itself(runs: Path) -> None:
    run = read_state_dict(runs / "zero1")
    for folder in (runs / "zero1" / "checkpoints", runs / "zero1" / "checkpoints" / "step_00000001"):
        state = read_state_dict(folder)
        assert all(torch.equal(state[name], run[name]) for name in run)


def test_a_lost_shard_is_named_in_one_line(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shard = next((runs / "zero2").glob("checkpoints/*/*rank_1_*optim_states.pt"))
    shard.rename(tmp_path / "lost.pt")
    assert main(["export", str(runs / "zero2"), str(tmp_path / "out.pt")]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "step_00000001: incomplete or damaged checkpoint" in message
    assert not (tmp_path / "out.pt").exists()
    (tmp_path / "lost.pt").rename(shard)


@pytest.mark.parametrize(
    ("pattern", "flags"), [("mp_*", []), ("*pp_rank_1*", []), ("frozen*", []), ("ema*1*", ["--ema"])]
)
def test_a_file_with_a_flipped_bit_is_not_exported(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture, pattern: str, flags: list[str]
) -> None:
    shutil.copytree(runs / "locked", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    checksums = {path.name: checksum(path) for path in checkpoint.glob("*.pt")}
    (checkpoint / STATE).write_text(json.dumps({CHECKSUMS: checksums}))
    export = ["export", str(tmp_path / "run"), str(tmp_path / "out.pt"), *flags]
    assert main(export) == 0
    (tmp_path / "out.pt").unlink()
    (damaged,) = checkpoint.glob(pattern)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert main(export) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {damaged} is damaged")
    assert not (tmp_path / "out.pt").exists()
