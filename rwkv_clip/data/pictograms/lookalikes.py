"""Pictures that look the same: found by their 16 x 16 copies, so that none is in training and in a test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CHUNK = 512


def features(thumbnails: Sequence[bytes]) -> np.ndarray:
    """Thumbnails as float32 [N, D] in 0..1."""
    return np.stack([np.frombuffer(thumbnail, np.uint8) for thumbnail in thumbnails]).astype(np.float32) / 255


def lookalike(
    pictures: np.ndarray, others: np.ndarray, distance: float, correlation: float, earlier_only: bool = False
) -> np.ndarray:
    """For each picture the first of `others` that looks like it, or -1: int64 [N].

    Two look alike when their root mean square distance is below `distance` (0..1 per channel) and their correlation
    is above `correlation`.

    Args:
        pictures, others: float32 [N, D] and [M, D].
        earlier_only: both are the same list, and only rows before the picture's own count.
    """
    found = np.full(len(pictures), -1)
    if not len(others):
        return found
    squares, centred = (others**2).sum(1), _centred(others)
    for start in range(0, len(pictures), CHUNK):
        rows = pictures[start : start + CHUNK]
        squared = (rows**2).sum(1)[:, None] + squares - 2 * rows @ others.T
        alike = (squared < distance**2 * rows.shape[1]) & (_centred(rows) @ centred.T > correlation)
        if earlier_only:
            alike &= np.arange(len(others)) < np.arange(start, start + len(rows))[:, None]
        found[start : start + len(rows)] = np.where(alike.any(1), alike.argmax(1), -1)
    return found


def _centred(rows: np.ndarray) -> np.ndarray:
    rows = rows - rows.mean(1, keepdims=True)
    return rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-6)
