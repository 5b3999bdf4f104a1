"""The one exception that a user's mistake raises, and how an entry point reports it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Sequence


class UserError(Exception):
    """Something that the user can put right.

    The message is one line: what is wrong, the value found, and what to do. Entry points print it without a traceback
    and exit with status 2 on every rank.
    """


def report(error: UserError) -> int:
    """Print `error` as one line on stderr and return the exit status (2)."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 2


def check_flags(words: Sequence[str], known: Collection[str]) -> None:
    """`UserError` for a word --like-this that is no flag. Before argparse, which complains of a missing one first."""
    for word in words:
        flag = word.partition("=")[0]
        if word == "--":
            return
        if flag.startswith("--") and flag not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            raise UserError(f"unknown argument '{flag}'; " + (f"did you mean {near[0]}?" if near else "see --help"))
