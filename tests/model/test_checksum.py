"""What a checksum of a file is of, and what it finds."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from rwkv_clip.errors import UserError
from rwkv_clip.model.checksum import check, checksum, save

CONTENT = {"weights": torch.arange(700_000.0), "name": "a", "none": torch.zeros(0)}
"""More than a block of the reader, and more than one."""


def test_the_checksum_taken_while_writing_is_the_file_s(tmp_path: Path) -> None:
    size, taken = save(CONTENT, tmp_path / "file.pt")
    data = (tmp_path / "file.pt").read_bytes()
    assert len(data) == size and taken == f"{zlib.crc32(data):08x}" == checksum(tmp_path / "file.pt")
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "file.pt", mmap=mmap)
        assert torch.equal(loaded["weights"], CONTENT["weights"]) and loaded["name"] == "a"


@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_one_byte_that_changed_is_found_wherever_it_is(tmp_path: Path, place: float) -> None:
    path = tmp_path / "file.pt"
    _, taken = save(CONTENT, path)
    check(path, taken)
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"file.pt is damaged: .*{checksum(path)}, and had {taken} .* earlier"):
        check(path, taken)


def test_a_disk_that_is_full_is_an_error_and_no_crash() -> None:
    with pytest.raises(OSError, match="No space left"):
        save(CONTENT, Path("/dev/full"))


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.pt cannot be read \(No such file or directory\); use an earlier"):
        check(tmp_path / "gone.pt", "00000000")
