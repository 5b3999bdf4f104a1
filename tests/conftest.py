import signal
from pathlib import Path

import pytest

# Started in the background, a shell's children ignore Ctrl-C, and so would the programs that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of hand-made test data (see its README)."""
    return Path(__file__).parent / "fixtures"
