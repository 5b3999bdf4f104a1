"""Our RecordIO files against real mxnet 1.9.1, which lives in a virtual environment of its own (`.venv-mxnet`).

mxnet 1.9.1 needs numpy < 1.24 and so Python <= 3.11. The environment is made when it is missing (300 MB, once); without
a fitting Python or a package index the tests are skipped with the reason.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rwkv_clip.cli import main
from rwkv_clip.data.dataset import open_dataset
from rwkv_clip.data.record_format import MAGIC_BYTES
from rwkv_clip.data.record_scan import rebuild_index
from rwkv_clip.data.recordio import RecordFile, RecordWriter
from rwkv_clip.errors import UserError

ROOT = Path(__file__).parents[2]
SIDE = Path(__file__).with_name("mxnet_side.py")
REQUIREMENTS = ["numpy==1.23.5", "mxnet==1.9.1"]
MAGIC_AS_FLOAT = np.frombuffer(MAGIC_BYTES, np.float32)[0]


def fitting_python() -> str | None:
    if sys.version_info[:2] in ((3, 10), (3, 11)):
        return sys.executable
    for name in ("python3.11", "python3.10"):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return found
    return None


@pytest.fixture(scope="session")
def mxnet_python() -> str:
    """The interpreter of an environment with mxnet 1.9.1; made at first use and kept."""
    folder = ROOT / ".venv-mxnet"
    python = folder / "bin" / "python"
    if python.exists() and list(folder.glob("lib/python3.*/site-packages/mxnet-1.9.1.dist-info/RECORD")):
        return str(python)
    base = fitting_python()
    if base is None:
        pytest.skip("mxnet 1.9.1 needs Python 3.10 or 3.11, and none was found")
    shutil.rmtree(folder, ignore_errors=True)
    made = subprocess.run([base, "-m", "venv", str(folder)], capture_output=True, text=True)
    if made.returncode == 0:
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1"]
        made = subprocess.run([*pip, "--timeout", "30", *REQUIREMENTS], capture_output=True, text=True)
    if made.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        reason = (made.stderr.strip() or made.stdout.strip() or "no output").splitlines()[-1]
        pytest.skip(f"mxnet 1.9.1 could not be installed: {reason}")
    return str(python)


def hard_cases() -> list[tuple[int, object, bytes]]:
    """(key, label, payload): the magic at every alignment, and every length of padding."""
    random = np.random.default_rng(0)
    label = np.zeros(231, np.float32)
    label[:3] = [49406, 300, 49407]
    with_magic = label.copy()
    with_magic[[0, 100, 230]] = MAGIC_AS_FLOAT
    payloads = [b"", b"a", MAGIC_BYTES, MAGIC_BYTES * 2, MAGIC_BYTES + b"z", b"abcd" + MAGIC_BYTES]
    payloads += [bytes(shift) + MAGIC_BYTES + bytes(7) for shift in range(8)]
    payloads += [random.bytes(length) for length in (1023, 1024, 1025, 70_001)]
    for _ in range(40):
        pieces = [MAGIC_BYTES if draw < 0.4 else random.bytes(int(draw * 12)) for draw in random.random(12)]
        payloads.append(b"".join(pieces))
    cases: list[tuple[int, object, bytes]] = []
    for number, payload in enumerate(payloads):
        cases.append((number, with_magic if number % 3 == 0 else label, payload))
    cases.append((len(cases), 5.0, b"one number as the label"))
    cases.append((int.from_bytes(MAGIC_BYTES, "little"), label[:77], b"the magic as the id"))
    cases.append((2**40, label[:154], b"a large key"))
    return cases


def run_mxnet_side(python: str, cases, folder: Path, command: str, *arguments) -> subprocess.CompletedProcess:
    saved = [(key, label.tobytes() if isinstance(label, np.ndarray) else label, data) for key, label, data in cases]
    (folder / "cases.pickle").write_bytes(pickle.dumps(saved, protocol=4))
    words = [python, SIDE, command, folder / "cases.pickle", *arguments]
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120)


def test_writer_and_reader_agree_with_mxnet_byte_for_byte(mxnet_python, tmp_path):
    cases = hard_cases()
    with RecordWriter(tmp_path / "ours") as writer:
        for key, label, payload in cases:
            writer.write(key, label, payload)
    done = run_mxnet_side(mxnet_python, cases, tmp_path, "exchange", tmp_path / "theirs", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    for extension in (".rec", ".idx"):
        ours, theirs = ((tmp_path / f"{name}{extension}").read_bytes() for name in ("ours", "theirs"))
        assert len(ours) == len(theirs) and ours == theirs, f"{extension} differs"
    file = RecordFile(tmp_path / "ours.rec")
    assert file.check().num_multipart > 20
    read_here = []
    for i in range(len(file)):
        record = file.read(i)
        payload_md5 = hashlib.md5(record.payload).hexdigest()
        read_here.append([record.key, file.header(i)[2], record.label.tobytes().hex(), payload_md5])
    assert read_here == [json.loads(line) for line in done.stdout.splitlines()] and len(read_here) == len(cases)


@pytest.mark.parametrize(("records", "says"), [(300, "lists no record"), (1500, "ends with key 1... at byte .* more")])
def test_D13_leftovers_of_a_killed_mxnet_packer_are_a_clear_error(mxnet_python, tmp_path, records, says):
    """mxnet writes the index in blocks: nothing of it is there after 300 records, some of it after 1,500."""
    cases = [(key, np.full(231, 7, np.float32), bytes(9000)) for key in range(records + 100)]
    done = run_mxnet_side(mxnet_python, cases, tmp_path, "write", tmp_path / "killed", records)
    assert done.returncode == -9
    assert (tmp_path / "killed.rec").stat().st_size > 2_000_000
    with pytest.raises(UserError, match=f"killed.idx {says}.*--rebuild-index"):
        open_dataset(tmp_path / "killed")
    rebuild_index(tmp_path / "killed.rec")
    assert records - 10 < len(open_dataset(tmp_path / "killed")) <= records


def test_D23_mxnet_reads_what_pack_writes(mxnet_python, fixtures, tmp_path):
    """Pictures as they were, the label, and mxnet's own way to open a record: by key, through the index."""
    (tmp_path / "in").mkdir()
    for name in ("rgb", "gray", "exif_rot6", "cmyk_adobe"):
        shutil.copy(fixtures / "img" / f"{name}.jpg", tmp_path / "in")
        (tmp_path / "in" / f"{name}.txt").write_text(f"a picture called {name}\na second caption\n")
    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "1"]) == 0
    data = open_dataset(tmp_path / "out")
    file = data.files[0]
    done = run_mxnet_side(mxnet_python, [], tmp_path, "read", file.rec_path.with_suffix(""))
    assert done.returncode == 0, done.stderr
    read_here = []
    for i in range(len(file)):
        record = file.read(i)
        payload_md5 = hashlib.md5(record.payload).hexdigest()
        read_here.append([i, file.header(i)[2], record.label.tobytes().hex(), payload_md5])
    assert [json.loads(line) for line in done.stdout.splitlines()] == read_here and len(read_here) == 4
    kept = {hashlib.md5((fixtures / "img" / f"{name}.jpg").read_bytes()).hexdigest() for name in ("rgb", "exif_rot6")}
    assert kept <= {hashlib.md5(data.read(i).payload).hexdigest() for i in range(4)}
