from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of hand-made test data (see its README)."""
    return Path(__file__).parent / "fixtures"
