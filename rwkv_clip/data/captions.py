"""A row's captions as the label of a record: one to eight captions of 77 token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .sources.base import RowError
from .tokenizer import CONTEXT_LENGTH, END_TOKEN, START_TOKEN, VOCABULARY_SIZE, tokenize_numpy

MISSING_RULES = ("fill", "skip", "keep")

Caption = "str | Sequence[int] | np.ndarray | None"


def encode_captions(captions: Sequence[Caption], rule: str, why_none: str = "") -> tuple[np.ndarray, int]:
    """The label of one record.

    A caption is missing when it is None or when nothing is left of it after cleaning. `rule` says what then happens:
    "fill" takes the row's first caption that is there, "skip" leaves the row out, "keep" stores an empty caption
    (start and end token). A row without any caption is left out under "fill" and "skip".

    Args:
        captions: per caption its text, its token ids (start and end token included, zeros after it allowed), or None.
        rule: one of MISSING_RULES.
        why_none: what to say of a row that is left out because it has no caption at all.

    Returns:
        (float32 [len(captions) * 77], number of captions that were filled in).

    Raises:
        RowError: the row must be left out.
    """
    ids = np.zeros((len(captions), CONTEXT_LENGTH), np.float32)
    texts = [i for i, caption in enumerate(captions) if isinstance(caption, str)]
    if texts:
        ids[texts] = tokenize_numpy([captions[i] for i in texts])
    for i, caption in enumerate(captions):
        if caption is not None and not isinstance(caption, str):
            ids[i] = _checked_ids(caption, i)
    missing = (ids[:, 0] != START_TOKEN) | ((ids[:, 1] == END_TOKEN) & (ids[:, 2] == 0))
    if missing.any():
        if missing.all() and rule != "keep":
            raise RowError("no caption", why_none)
        if rule == "skip":
            raise RowError("caption missing", f"caption {int(missing.argmax()) + 1} of {len(captions)}")
        if rule == "keep":
            ids[missing] = 0
            ids[missing, :2] = START_TOKEN, END_TOKEN
            return ids.reshape(-1), 0
        ids[missing] = ids[missing.argmin()]
    return ids.reshape(-1), int(missing.sum())


def _checked_ids(caption: Sequence[int] | np.ndarray, i: int) -> np.ndarray:
    """Token ids as a whole row of 77; all zeros stands for a missing caption."""
    try:
        row = np.asarray(caption).astype(np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise RowError("wrong token ids", f"caption {i + 1} is no list of numbers") from None
    except OverflowError:  # JSON's whole numbers have no limit
        raise RowError("wrong token ids", f"caption {i + 1} holds ids outside 0 to {VOCABULARY_SIZE - 1}") from None
    if len(row) > CONTEXT_LENGTH:
        raise RowError("wrong token ids", f"caption {i + 1} has {len(row)} ids, at most {CONTEXT_LENGTH}")
    if not row.any():
        return np.zeros(CONTEXT_LENGTH, np.float32)
    last = row[np.flatnonzero(row)[-1]]
    if row[0] != START_TOKEN or last != END_TOKEN:
        raise RowError(
            "wrong token ids",
            f"caption {i + 1} starts with {row[0]:g} and ends with {last:g}, not {START_TOKEN} and {END_TOKEN}",
        )
    if (row % 1 != 0).any() or row.min() < 0 or row.max() >= VOCABULARY_SIZE:
        raise RowError("wrong token ids", f"caption {i + 1} holds ids outside 0 to {VOCABULARY_SIZE - 1}")
    return np.pad(row, (0, CONTEXT_LENGTH - len(row))).astype(np.float32)
