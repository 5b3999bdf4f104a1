"""Files of a data set on the Hugging Face hub: listed with their sizes, fetched side by side, checked.

The transfer is huggingface_hub's: it asks for the rest when a connection breaks, gives a file its name when it is
whole, and takes the address from HF_ENDPOINT and a token from HF_TOKEN. Here stands what it leaves to its caller: which
files are missing or of another size, and one line for each way in which a transfer of days can fail.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from .progress import Log, Progress

_ATTEMPTS = 3


class HubFile(NamedTuple):
    """A file of the repository: its path there, and its size in bytes."""

    path: str
    size: int


class Listing(NamedTuple):
    """Files of one commit, in the order of their names."""

    repository: str
    commit: str
    files: list[HubFile]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def missing(self, folder: Path) -> list[HubFile]:
        """The files that are not below `folder`, or not as large as they should be."""
        return [file for file in self.files if _size(folder / file.path) != file.size]


def list_files(repository: str, suffix: str) -> Listing:
    """The files of a data set repository whose names end in `suffix`, at its newest commit.

    Raises:
        UserError: huggingface_hub is missing, or the hub does not answer or holds no such file.
    """
    api = _hub().HfApi()
    try:
        commit = api.dataset_info(repository).sha
        entries = api.list_repo_tree(repository, repo_type="dataset", revision=commit, recursive=True)
        files = [HubFile(entry.path, entry.size) for entry in entries if entry.path.endswith(suffix)]
    except Exception as error:  # the library raises its own kinds and those of its HTTP client
        raise UserError(
            f"{_endpoint()} does not list the files of {repository} ({_brief(error)}): check the network, HF_ENDPOINT "
            f"(a mirror) and HF_TOKEN"
        ) from None
    for file in files:
        within = not Path(file.path).is_absolute() and ".." not in Path(file.path).parts
        if not within or not isinstance(file.size, int) or file.size < 0:
            raise UserError(
                f"{_endpoint()} lists {file.path!r} with {file.size!r} bytes in {repository}, which no hub does: check "
                "HF_ENDPOINT"
            )
    if not files:
        raise UserError(f"{repository} at {_endpoint()} holds no *{suffix} file: it is not laid out as it was")
    return Listing(repository, commit, sorted(files))


def download(listing: Listing, folder: Path, connections: int, log: Log | None = None) -> None:
    """Fetch what is missing into `folder`, keeping the repository's paths; whole files are never fetched again.

    Args:
        connections: files that are fetched side by side.
        log: takes a line now and then with the rate and the time left.

    Raises:
        UserError: naming the first file that could not be fetched whole, when all others are there, or at once when as
            many in a row failed as are fetched side by side. What is there stays; the same call fetches the rest.
    """
    _drop_left_overs(folder)
    missing = listing.missing(folder)
    progress = Progress("downloading", sum(file.size for file in missing) // 10**6, "MB", log)
    waiting: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[HubFile, Exception | None]] = queue.SimpleQueue()
    stopped = threading.Event()
    for file in missing:
        waiting.put(file)

    def fetch() -> None:
        while not stopped.is_set():
            try:
                file = waiting.get_nowait()
                _fetch(listing, file, folder)
                ended.put((file, None))
            except queue.Empty:
                return
            except Exception as error:  # whoever waits must hear of it
                ended.put((file, error))

    # Daemons, because files under way would hold up the user for minutes after an error or Ctrl-C.
    for _ in range(min(connections, len(missing))):
        threading.Thread(target=fetch, name="download", daemon=True).start()
    first_error, in_a_row = None, 0
    try:
        for _ in missing:
            file, error = ended.get()
            if error is None:
                in_a_row = 0
                progress(file.size // 10**6)
                continue
            first_error = first_error or error
            in_a_row += 1
            # One bad file costs nobody the others; a network that is gone need not be tried 1,500 times.
            if in_a_row >= connections:
                break
    finally:
        stopped.set()
    if first_error is not None:
        raise first_error


def _fetch(listing: Listing, file: HubFile, folder: Path) -> None:
    target = folder / file.path
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _hub().hf_hub_download(
                listing.repository,
                file.path,
                repo_type="dataset",
                revision=listing.commit,
                local_dir=folder,
                # The library takes a file that it finds for whole.
                force_download=target.exists() and _size(target) != file.size,
            )
            found = f"{_size(target):,} bytes came and {file.size:,} were listed"
        except Exception as error:  # the library raises its own kinds and those of its HTTP client
            found = _brief(error)
        if _size(target) == file.size:
            return
        if attempt == _ATTEMPTS:
            raise UserError(
                f"{file.path} could not be fetched from {_endpoint()} ({found}): the same command goes on with it; "
                f"what is there already stays"
            )


def _drop_left_overs(folder: Path) -> None:
    """Remove what a killed run had fetched of a file: the library begins such a file anew under another name."""
    for left in (folder / ".cache" / "huggingface" / "download").rglob("*.incomplete"):
        left.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _hub():
    try:
        import huggingface_hub
        from huggingface_hub import utils
    except ImportError as error:
        raise UserError(
            f"the data set is fetched with huggingface_hub ({error}): run `pip install huggingface_hub`"
        ) from None
    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    return huggingface_hub


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _brief(error: Exception) -> str:
    words: Sequence[str] = str(error).split()
    return f"{type(error).__name__}: {' '.join(words)}"[:200]
