"""The one exception that a user's mistake raises, and how an entry point reports it."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Collection, Iterator, Sequence


class UserError(Exception):
    """Something that the user can put right.

    The message is one line: what is wrong, the value found, and what to do. Entry points print it without a traceback
    and exit with status 2 on every rank.
    """


def report(error: UserError) -> int:
    """Print `error` as one line on stderr and return the exit status (2)."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 2


@contextlib.contextmanager
def os_errors_in_words(place: str | os.PathLike) -> Iterator[None]:
    """Turn an OSError that nothing nearer puts into words, such as that of a full disk, into a `UserError`.

    Args:
        place: the folder that is worked in, for the errors that name no file.
    """
    try:
        yield
    except OSError as error:
        # NumPy tells a full disk without the system's words: "600 requested and 512 written".
        reason = error.strerror or f"{error} (is the disk full?)"
        raise UserError(
            f"{error.filename or place}: {reason}; put that right and give the same command again"
        ) from None


def check_flags(words: Sequence[str], known: Collection[str]) -> None:
    """`UserError` for a word --like-this that is no flag. Before argparse, which complains of a missing one first."""
    for word in words:
        flag = word.partition("=")[0]
        if word == "--":
            return
        if flag.startswith("--") and flag not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            raise UserError(f"unknown argument '{flag}'; " + (f"did you mean {near[0]}?" if near else "see --help"))
