from pathlib import Path

import pytest
from jobs import pictures, write_data, write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="session")
def data(folder: Path, fixtures: Path) -> Path:
    """64 records in two pairs: 4 steps of 2 ranks with 8 each."""
    payloads = pictures(fixtures, 64)
    write_data(folder / "data" / "a", payloads[:40])
    write_data(folder / "data" / "b", payloads[40:])
    return folder / "data"


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    """With drop path, so that random states matter."""
    return write_model(folder / "with_drop_path.json", drop_path_rate=0.3)


@pytest.fixture(scope="session")
def plain_model(folder: Path) -> Path:
    return write_model(folder / "plain.json")
