"""The one exception that a user's mistake raises, and how an entry point reports it."""

from __future__ import annotations

import sys


class UserError(Exception):
    """Something that the user can put right.

    The message is one line: what is wrong, the value found, and what to do. Entry points print it without a traceback
    and exit with status 2 on every rank.
    """


def report(error: UserError) -> int:
    """Print `error` as one line on stderr and return the exit status (2)."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 2
