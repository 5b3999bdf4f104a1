"""`rwkv-clip prepare yfcc15m` against a local server that speaks the hub's protocol."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple

import numpy as np
import pytest
from hub_server import COMMIT, Hub
from PIL import Image

from rwkv_clip.cli import main
from rwkv_clip.data import hub as hub_module
from rwkv_clip.data import yfcc15m
from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.data.hub import HubFile, Listing
from rwkv_clip.data.tokenizer import tokenize_numpy
from rwkv_clip.errors import UserError

parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("huggingface_hub")
import pyarrow  # noqa: E402

NAMES = [f"data/train-{number:05}-of-00003.parquet" for number in (1, 2, 3)]
ROWS = [4, 4, 2]


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 30), (number * 20, 90, 200)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="module")
def published() -> dict[str, bytes]:
    """Three files with the columns that the hub's have, and what else stands in the repository.

    The second is larger than the 10 MB that huggingface_hub takes from a connection at a time.
    """
    files, number = {"README.md": b"---\n", ".gitattributes": b"*\n"}, 0
    for name, count in zip(NAMES, ROWS, strict=True):
        rows = range(number, number + count)
        number += count
        texts = tokenize_numpy([f"a generated description {row}" for row in rows]).astype(np.float32)
        table = pyarrow.table(
            {
                "images": pyarrow.array([{"bytes": jpeg(row)} for row in rows]),
                "texts": pyarrow.array(list(texts), pyarrow.list_(pyarrow.float32())),
            }
        )
        if name == NAMES[1]:
            table = table.append_column("unused", [[os.urandom(6_000_000) for _ in rows]])
        out = io.BytesIO()
        parquet.write_table(table, out)
        files[name] = out.getvalue()
    return files


@pytest.fixture
def hub(published):
    with Hub(yfcc15m.REPOSITORY, published) as server:
        yield server


def command(hub: Hub, *arguments) -> list[str]:
    return [sys.executable, "-m", "rwkv_clip.cli", "prepare", "yfcc15m", *map(str, arguments)]


def environment(hub: Hub) -> dict[str, str]:
    return os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def prepare(hub: Hub, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(command(hub, *arguments), env=environment(hub), capture_output=True, text=True, timeout=100)


def one_line(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_the_data_set_is_fetched_by_many_connections_and_packed_with_its_three_captions(hub, published, tmp_path):
    ids = tokenize_numpy([f"{kind} {row}" for kind in ("raw", "synthetic") for row in range(10)]).reshape(2, 10, 77)
    np.save(tmp_path / "tokens.npy", np.concatenate(ids, 1).astype(np.int32))
    hub.gate = threading.Barrier(3)  # no file is sent before all three are asked for
    done = prepare(hub, tmp_path / "out", "--tokens", tmp_path / "tokens.npy", "--connections", 3, "--workers", 1)
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.partition("of disk are needed")
    assert f"{COMMIT[:12]}: 3 files" in before and "are free in" in after.splitlines()[0]
    for name in NAMES:
        assert (tmp_path / "out/download" / name).read_bytes() == published[name]
    assert set(hub.fetched) == set(NAMES) and hub.most_busy == 3
    data = open_dataset(tmp_path / "out/packed")
    assert data.caption_names == ["raw", "synthetic", "generated"] and len(data) == 10
    for i in range(10):
        record, row = data.read(i), data.files[0].header(i)[2]
        expected = [ids[0, row], ids[1, row], tokenize_numpy([f"a generated description {row}"])[0]]
        assert (record.label.reshape(3, 77) == expected).all() and bytes(record.payload) == jpeg(row)
    again = prepare(hub, tmp_path / "out", "--tokens", tmp_path / "tokens.npy")
    assert again.returncode == 0 and "is packed already; nothing to do" in again.stdout
    assert "; 0.0 GB in 0 files to fetch" in again.stdout
    assert all(len(ranges) == 1 for ranges in hub.fetched.values())


def test_a_connection_that_breaks_goes_on_where_it_broke_and_the_pack_command_that_is_printed_works(
    hub, published, tmp_path, capfd
):
    hub.cut[NAMES[1]] = len(published[NAMES[1]]) // 2
    done = prepare(hub, tmp_path / "out", "--download-only")
    assert done.returncode == 0, done.stderr
    (first, rest) = hub.fetched[NAMES[1]]
    assert first is None and int(re.match(r"bytes=(\d+)-", rest)[1]) >= 10_000_000
    assert (tmp_path / "out/download" / NAMES[1]).read_bytes() == published[NAMES[1]]
    assert not (tmp_path / "out/packed").exists()
    words = shlex.split(done.stdout.splitlines()[-1].partition("pack them with: ")[2])
    assert words[:2] == ["rwkv-clip", "pack"] and main([*words[1:], "--workers", "1"]) == 0
    assert open_dataset(tmp_path / "out/packed").caption_names == ["generated"]


def test_a_file_of_another_size_than_listed_is_never_packed_and_the_next_run_fetches_it_again(hub, published, tmp_path):
    hub.listed_sizes[NAMES[2]] = len(published[NAMES[2]]) + 1
    line = one_line(prepare(hub, tmp_path / "out"))
    assert f"{NAMES[2]} could not be fetched from {hub.url} (" in line and "the same command goes on" in line
    assert f"{len(published[NAMES[2]]):,} bytes came and {len(published[NAMES[2]]) + 1:,} were listed" in line
    assert not (tmp_path / "out/packed").exists()
    del hub.listed_sizes[NAMES[2]]
    # A file that someone cut short is noticed by its size too.
    (tmp_path / "out/download" / NAMES[0]).write_bytes(b"short")
    hub.fetched.clear()
    done = prepare(hub, tmp_path / "out", "--download-only")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/download" / NAMES[0]).read_bytes() == published[NAMES[0]]
    assert NAMES[1] not in hub.fetched


def test_killed_or_interrupted_it_keeps_whole_files_and_goes_on(hub, published, tmp_path):
    whole = [tmp_path / "out/download" / name for name in NAMES[:2]]
    hub.held = NAMES[2]
    for number in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(
            command(hub, tmp_path / "out", "--connections", 2), env=environment(hub), stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while not (all(path.exists() for path in whole) and hub.busy):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert process.returncode == (130 if number == signal.SIGINT else -9)
        assert number == signal.SIGKILL or said == "stopped; the same command goes on where it stopped\n"
        assert not (tmp_path / "out/download" / NAMES[2]).exists()
        hub.let_go.set()
        while hub.busy:
            time.sleep(0.02)
        hub.let_go.clear()
    hub.held = None
    hub.fetched.clear()
    done = prepare(hub, tmp_path / "out", "--download-only")
    assert done.returncode == 0, done.stderr
    assert set(hub.fetched) == {NAMES[2]}
    assert not list((tmp_path / "out/download").rglob("*.incomplete"))


@pytest.mark.parametrize("moment", ["open_source", "pack"])
def test_interrupted_after_the_files_are_there_it_says_how_to_go_on(tmp_path, capsys, monkeypatch, moment):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_module, "list_files", lambda *_: Listing(yfcc15m.REPOSITORY, COMMIT, [HubFile("a", 1)]))
    monkeypatch.setattr(hub_module, "download", lambda *_: None)
    monkeypatch.setattr(yfcc15m, "open_source", lambda *_, **__: None)
    monkeypatch.setattr(yfcc15m, moment, stop)
    assert main(["prepare", "yfcc15m", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on where it stopped\n"


def test_a_network_that_is_gone_is_not_tried_file_by_file(tmp_path, monkeypatch):
    tried = []

    def fail(listing, file, folder):
        tried.append(file.path)
        time.sleep(0.05)
        raise UserError(f"{file.path} could not be fetched")

    monkeypatch.setattr(hub_module, "_fetch", fail)
    listing = Listing(yfcc15m.REPOSITORY, COMMIT, [HubFile(f"data/{i:05}.parquet", 746_000_000) for i in range(1507)])
    with pytest.raises(UserError, match="could not be fetched"):
        hub_module.download(listing, tmp_path, connections=4)
    assert 4 <= len(tried) < 100


def test_a_hub_that_does_not_answer_or_holds_something_else_is_one_line(hub, tmp_path):
    hub.files = {"README.md": b"moved"}
    assert "holds no *.parquet file" in one_line(prepare(hub, tmp_path / "out"))
    hub.repository = "someone/else"
    assert f"{hub.url} does not list the files of {yfcc15m.REPOSITORY}" in one_line(prepare(hub, tmp_path / "out"))


@pytest.mark.parametrize(("path", "size"), [(NAMES[0], "big"), (NAMES[0], -5), ("../x.parquet", 5)])
def test_a_listing_that_no_hub_gives_is_one_line(hub, tmp_path, path, size):
    hub.files = {path: b"12345"}
    hub.listed_sizes = {path: size}
    done = subprocess.run(command(hub, tmp_path / "out"), env=environment(hub), capture_output=True, text=True)
    assert done.returncode == 2 and "which no hub does: check HF_ENDPOINT" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(tmp_path, monkeypatch, capsys):
    listing = Listing(yfcc15m.REPOSITORY, COMMIT, [HubFile(f"data/{i}.parquet", 746_000_000) for i in range(1507)])
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(yfcc15m.shutil, "disk_usage", lambda _: usage(1_200_000_000_000))
    yfcc15m.say_size(listing, tmp_path, tmp_path / "download", to_pack=False)
    said = capsys.readouterr().out
    assert "1,124.2 GB in 1,507 files to fetch" in said and "1,200.0 GB are free" in said
    with pytest.raises(UserError, match="1,200.0 GB free and 3,372.7 GB are needed: .* or give --download-only"):
        yfcc15m.say_size(listing, tmp_path, tmp_path / "download", to_pack=True)
    monkeypatch.setattr(yfcc15m.shutil, "disk_usage", lambda _: usage(1_000_000_000_000))
    with pytest.raises(UserError, match="1,124.2 GB are needed: name a folder on a larger disk$"):
        yfcc15m.say_size(listing, tmp_path, tmp_path / "download", to_pack=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--connections", "0"], "--connections is 0: give 1 to 256"),
        (["--workers", "0"], "--workers is 0"),
        (["--tokens", "none.npy"], "--tokens none.npy cannot be read as .npy"),
        (["--tokens", "{}/empty.npy"], "empty.npy cannot be read as .npy (EOF: reading magic string"),
        (["--tokens", "{}/wide.npz"], "wide.npz cannot be read as .npy (the magic string is not correct"),
        (["--tokens", "{}/wide.npy"], "is [3, 77]: [rows, 154] is needed"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_fetched(tmp_path, capsys, arguments, message):
    np.save(tmp_path / "wide.npy", np.zeros((3, 77), np.int32))
    np.savez(tmp_path / "wide.npz", np.zeros((3, 154), np.int32))
    (tmp_path / "empty.npy").touch()
    arguments = [argument.format(tmp_path) for argument in arguments]
    assert main(["prepare", "yfcc15m", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_missing_library_is_named_with_its_install_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["prepare", "yfcc15m", str(tmp_path / "out")]) == 2
    assert "pip install huggingface_hub" in capsys.readouterr().err
