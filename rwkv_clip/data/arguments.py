"""Types of command-line arguments that the data commands share."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError


def path(text: str) -> Path:
    """A path; an empty one, which pathlib takes for the working folder, is refused.

    Raises:
        UserError: the text is empty.
    """
    if not text.strip():
        raise UserError(f"a path is {text!r}: name a file or folder (is a variable of the shell not set?)")
    return Path(text)
