from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path, fixtures) -> Path:
    """Pictures a.jpg ... h.jpg."""
    for name in "abcdefgh":
        shutil.copy(fixtures / "img/rgb.jpg", tmp_path / f"{name}.jpg")
    return tmp_path
