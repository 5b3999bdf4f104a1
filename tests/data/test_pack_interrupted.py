"""Packing that is killed, interrupted, out of room, or started twice."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from pack_data import ROOT, contents, make_parquet, make_table, pack_command, pack_here

from rwkv_clip.cli import main
from rwkv_clip.data import packing
from rwkv_clip.data.children import map_in_processes
from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.data.exclusive import exclusive
from rwkv_clip.data.progress import Progress
from rwkv_clip.data.sources import open_source, parquet
from rwkv_clip.errors import UserError


def workers_of(process: subprocess.Popen) -> list[int]:
    """Process ids of a packer's workers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_D13_killed_at_any_moment_it_leaves_nothing_that_looks_finished_and_goes_on(tmp_path):
    table = make_table(tmp_path / "in", 1000)
    out = tmp_path / "out"
    command = pack_command(table, out, shard_size=60)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    reports = tmp_path / "out.partial/reports"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(reports.glob("*.json"))) < 3:
        time.sleep(0.01)
    workers = workers_of(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    with pytest.raises(UserError):
        open_dataset(out)
    with pytest.raises(UserError):
        open_dataset(tmp_path / "out.partial")
    while time.monotonic() < deadline and any(is_running(pid) for pid in workers):
        time.sleep(0.01)  # its processes end with it
    assert len(workers) == 2 and not any(is_running(pid) for pid in workers)
    finished = {path.name: path.read_bytes() for path in reports.glob("*.json")}
    assert 3 <= len(finished) < 17
    again = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120)
    assert again.returncode == 0
    assert f"going on: {len(finished)} of 17 shards are there already" in again.stdout
    straight = tmp_path / "straight"
    pack_here(table, straight, shard_size=60)
    assert contents(out) == contents(straight)
    assert not (tmp_path / "out.partial").exists()


def test_interrupted_by_the_keyboard_it_says_how_to_go_on(tmp_path):
    table = make_table(tmp_path / "in", 600)
    command = pack_command(table, tmp_path / "out", shard_size=30)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((tmp_path / "out.partial/reports").glob("*.json")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "stopped; the same command goes on where it stopped\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (OSError(28, "No space left on device"), 2)])
def test_copies_of_parquet_files_that_are_finished_outlive_what_stops_the_next_one(
    tmp_path, capsys, monkeypatch, error, status
):
    files = make_parquet(tmp_path / "in", [3, 3, 3])
    command = ["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "0"]
    picture, seen = parquet._picture, []

    def stop_in_the_third(value):
        seen.append(value)
        if len(seen) > 7:
            raise error
        return picture(value)

    monkeypatch.setattr(parquet, "_picture", stop_in_the_third)
    assert main(command) == status
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.undo()
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out.partial/index/*.places/done")}
    assert len(finished) == 2
    monkeypatch.setattr(packing.pack_workers, "run", lambda *_: pytest.fail("far enough"))
    with pytest.raises(pytest.fail.Exception):
        main(command)
    assert "copying rows out of 1 parquet files (0 MB); 2 are copied already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    monkeypatch.undo()
    assert main(command) == 0 and len(open_dataset(tmp_path / "out")) == 9
    # Finished, it is not copied again.
    monkeypatch.setattr(parquet, "_copy", lambda *_, **__: pytest.fail("copied"))
    assert main(command) == 0 and "is packed already" in capsys.readouterr().out
    os.utime(files[0])
    assert main(command) == 2 and "holds another packing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--caption-names", "a,b"], "--caption-names gives 2 names and the source has 1"),
        (["--tokens", "raw=none.npy"], "none.npy cannot be read"),
        (["--tokens", "raw={}:0-99"], "has columns 0-76"),
        (["--tokens", "raw={}"], "has 2 rows and the source 6"),
        (["--tokens", "raw={}", "--join-by-key"], "name it with --key-column"),
    ],
)
def test_mistakes_are_told_before_parquet_files_are_copied(tmp_path, capsys, monkeypatch, options, message):
    make_parquet(tmp_path / "in", [3, 3])
    np.save(tmp_path / "t.npy", np.zeros((2, 77), np.int32))
    monkeypatch.setattr(parquet, "_copy", lambda *_, **__: pytest.fail("copied"))
    options = [option.format(tmp_path / "t.npy") for option in options]
    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("counts", [[300, 40], [1, 2, 3, 4]])
def test_copying_tells_its_rate_and_the_time_left(tmp_path, monkeypatch, counts):
    make_parquet(tmp_path / "in", counts)
    source = open_source(tmp_path / "in")
    source.build_index(tmp_path)
    monkeypatch.setattr(parquet, "Progress", functools.partial(Progress, every=0))
    lines: list[str] = []
    source.copy_rows(tmp_path, lines.append)
    total = sum(counts)
    assert len(lines) == 1 + (3 if counts[0] == 300 else 4)  # batches of 256 rows, or files
    assert lines[-1].startswith(f"copying: {total} of {total} rows (") and lines[-1].endswith("/s, 0 s left)")


def blocks_ctrl_c(_: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_processes_that_read_a_source_leave_ctrl_c_to_their_parent():
    assert map_in_processes(blocks_ctrl_c, range(4)) == [True] * 4
    assert not blocks_ctrl_c(0)


def sleep_or_fail(seconds: float) -> None:
    time.sleep(seconds)
    if not seconds:
        raise UserError("the first one fails")


def test_processes_that_read_a_source_end_when_one_fails():
    start = time.monotonic()
    with pytest.raises(UserError, match="the first one fails"):
        map_in_processes(sleep_or_fail, [0.0, 60.0, 60.0, 60.0])
    assert time.monotonic() - start < 30


def test_an_unfinished_packing_of_other_rows_is_started_anew(tmp_path, capsys, monkeypatch):
    table = make_table(tmp_path / "in", 10)

    def stop(*_):
        raise UserError("stopped")

    monkeypatch.setattr(packing, "_finish", stop)
    with pytest.raises(UserError, match="stopped"):
        pack_here(table, tmp_path / "out", shard_size=5)
    monkeypatch.undo()
    assert len(list((tmp_path / "out.partial/reports").glob("*.json"))) == 2
    table.write_text("\n".join(table.read_text().splitlines()[:5]) + "\n")
    assert pack_here(table, tmp_path / "out", shard_size=5)["packed"] == 4
    assert "starting anew: an unfinished packing had source" in capsys.readouterr().out
    assert len(open_dataset(tmp_path / "out")) == 4


def test_two_packers_do_not_write_one_folder(tmp_path):
    table = make_table(tmp_path / "in", 3)
    with exclusive(tmp_path / "out.partial", "the test"):
        with pytest.raises(UserError, match="another packer is writing"):
            pack_here(table, tmp_path / "out")
    assert pack_here(table, tmp_path / "out")["packed"] == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_is_one_message_and_leaves_no_result(tmp_path, monkeypatch):
    table = make_table(tmp_path / "in", 3)
    real = open

    def full(path, *args, **options):
        return real("/dev/full" if str(path).endswith(".rec.partial") else path, *args, **options)

    monkeypatch.setattr("rwkv_clip.data.record_writer.open", full, raising=False)
    with pytest.raises(UserError, match="No space left"):
        pack_here(table, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("numpy.save", OSError("600 requested and 512 written"), "600 requested and 512 written (is the disk full?)"),
        ("pathlib.Path.write_text", OSError(28, "No space left on device"), "out.partial: No space left on device"),
        ("rwkv_clip.data.packing.pack_workers.run", OSError(28, "No space left", "x.rec"), "x.rec: No space left"),
        ("rwkv_clip.data.packing.write_manifest", OSError(5, "Input/output error"), "out.partial: Input/output error"),
    ],
)
def test_what_the_system_refuses_anywhere_is_one_line_and_the_same_command_works_later(
    tmp_path, capsys, monkeypatch, function, error, message
):
    def refuse(*_, **__):
        raise error

    command = ["pack", str(make_table(tmp_path / "in", 3)), str(tmp_path / "out"), "--workers", "0"]
    monkeypatch.setattr(function, refuse)
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and line.endswith("give the same command again")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert main(command) == 0


@pytest.mark.parametrize("content", [b"", b'{"version": 1, "sour', b"\xff\0"])
def test_a_recipe_that_a_crash_left_empty_or_cut_counts_as_none(tmp_path, content):
    table = make_table(tmp_path / "in", 3)
    (tmp_path / "out.partial/data").mkdir(parents=True)
    (tmp_path / "out.partial/recipe.json").write_bytes(content)
    (tmp_path / "out.partial/data/data-00000.rec").write_bytes(b"of another packing")
    assert pack_here(table, tmp_path / "out")["packed"] == 3
    assert len(open_dataset(tmp_path / "out")) == 3


@pytest.mark.parametrize("content", [b"", b'{"rows": 5, "pac'])
def test_a_shard_whose_report_a_crash_left_empty_or_cut_is_packed_again(tmp_path, monkeypatch, capsys, content):
    table = make_table(tmp_path / "in", 20)
    pack_here(table, tmp_path / "straight", shard_size=5)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(packing, "_finish", crash)
    with pytest.raises(KeyboardInterrupt):
        pack_here(table, tmp_path / "out", shard_size=5)
    monkeypatch.undo()
    reports = sorted((tmp_path / "out.partial/reports").glob("*.json"))
    reports[2].write_bytes(content)
    pack_here(table, tmp_path / "out", shard_size=5)
    assert len(reports) == 4 and "going on: 3 of 4 shards are there already" in capsys.readouterr().out
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_process_that_is_killed_is_reported_and_the_same_command_goes_on(tmp_path):
    table = make_table(tmp_path / "in", 400)
    out = tmp_path / "out"
    command = pack_command(table, out, shard_size=50)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    reports = tmp_path / "out.partial/reports"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(reports.glob("*.json")):
        time.sleep(0.01)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "ended by SIGKILL (out of memory?)" in errors and "Traceback" not in errors
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=120).returncode == 0
    assert len(open_dataset(out)) == 400
