"""Files that show under their name when they are whole, and what killed writers leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rwkv_clip.model.published import read_state_dict, save
from rwkv_clip.model.whole_file import remove_leftovers, whole_file
from rwkv_clip.training.run_folder import RunFolder

WRITER = """
import sys
from pathlib import Path
from rwkv_clip.model.whole_file import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start_writer():
    """Starts a process that is in the middle of writing a file."""
    writers = []

    def start(path: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", WRITER, str(path)]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        writers.append(writer)
        assert writer.stdout.readline() == "writing\n"
        return writer

    yield start
    for writer in writers:
        writer.kill()
        writer.wait()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_next_save_removes_what_a_killed_writer_left(tmp_path: Path, start_writer) -> None:
    out = tmp_path / "weights.pt"
    writer = start_writer(out)
    writer.kill()
    writer.wait()
    assert len(names(tmp_path)) == 1
    save(out, {"a": torch.ones(2)})
    assert names(tmp_path) == {"weights.pt"}


def test_a_run_s_next_start_removes_what_a_killed_writer_left(tmp_path: Path, start_writer) -> None:
    run = RunFolder(tmp_path)
    for path in (run.weights, run.weights_ema):
        writer = start_writer(path)
        writer.kill()
        writer.wait()
    assert len(names(tmp_path)) == 2
    run.create("auto")
    assert names(tmp_path) == {"checkpoints", "run.lock"}


def test_a_live_writer_s_file_stays_and_becomes_whole(tmp_path: Path, start_writer) -> None:
    out = tmp_path / "weights.pt"
    writer = start_writer(out)
    save(out, {"a": torch.ones(2)})
    assert torch.equal(read_state_dict(out)["a"], torch.ones(2)) and len(names(tmp_path)) == 2
    writer.communicate("")
    assert writer.returncode == 0 and out.read_bytes() == b"half" and names(tmp_path) == {"weights.pt"}


def test_files_of_other_names_stay(tmp_path: Path) -> None:
    others = {".weights.pt.tmp", ".weights.pt.backup1", ".weights.pt.ABCDEFGH.tmp", ".weights_ema.pt.abcd1234.tmp"}
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".weights.pt.abcd1234.tmp").touch()
    remove_leftovers(tmp_path / "weights.pt")
    assert names(tmp_path) == others


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch) -> None:
    import fcntl

    lock, locked = fcntl.flock, []

    def late(file, how: int) -> None:
        if not locked:
            next(tmp_path.iterdir()).unlink()  # another process takes it for a leftover
        locked.append(file)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with whole_file(tmp_path / "a") as file:
        file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole" and names(tmp_path) == {"a"} and len(locked) == 2
