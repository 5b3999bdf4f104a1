"""The random choices of training: which caption, which crop, flipped or not.

All of them are pure functions of (seed, epoch, record id), through `sampler.sample_uniforms`. So a position (epoch,
samples consumed) says all that a resume needs, and a global batch holds the same pixels at any number of ranks.
The crop's distribution is that of DALI's `image_random_crop` with the published settings, rounding included.

A record's uniform numbers: 0 caption, 1 flip, 2 and 3 place of the crop (y, x), then area and aspect of each attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import UserError
from ..model.transform import CROP_AREA as AREA
from ..model.transform import CROP_ASPECT as ASPECT
from ..model.transform import CROP_ATTEMPTS as ATTEMPTS
from ..model.transform import FLIP_PROBABILITY
from .sampler import sample_uniforms

# Nearly all pictures find their crop among these; only the others pay for all attempts.
_FIRST_ATTEMPTS = 16
_FIXED = 4


class Choices(NamedTuple):
    """Choices for n training samples."""

    caption: np.ndarray  # int64 [n]
    flip: np.ndarray  # int32 [n], 0 or 1
    crop_start: np.ndarray  # int32 [n, 2], y and x in pixels
    crop_shape: np.ndarray  # int32 [n, 2], height and width in pixels


def choose(seed: int, epoch: int, ids: np.ndarray, image_shapes: np.ndarray, cumulative_weights: np.ndarray) -> Choices:
    """Everything random about some training samples.

    Args:
        seed, epoch: of the run.
        ids: global record ids, int64 [n].
        image_shapes: heights and widths of the upright pictures in pixels, [n, 2].
        cumulative_weights: see `cumulative_caption_weights`.
    """
    uniforms = sample_uniforms(seed, epoch, ids, _FIXED + 2 * _FIRST_ATTEMPTS)
    # The last entry is 1 and uniforms are below 1, so the index is always one of a caption.
    caption = np.searchsorted(cumulative_weights, uniforms[:, 0], side="right").astype(np.int64)
    flip = (uniforms[:, 1] < FLIP_PROBABILITY).astype(np.int32)

    height, width = np.asarray(image_shapes, np.int64).T
    shape, found = _impossible_crops(height, width)
    _try_attempts(shape, found, height, width, uniforms[:, _FIXED:])
    left = np.flatnonzero(~found)
    if len(left):
        more = sample_uniforms(seed, epoch, ids[left], _FIXED + 2 * ATTEMPTS)[:, _FIXED + 2 * _FIRST_ATTEMPTS :]
        late_shape, late_found = shape[left], found[left]
        _try_attempts(late_shape, late_found, height[left], width[left], more)
        late_shape[~late_found] = _fallback(height[left], width[left])[~late_found]
        shape[left] = late_shape
    room = np.stack([height, width], 1) - shape
    start = np.minimum(uniforms[:, 2:4].astype(np.float64) * (room + 1), room)
    return Choices(caption, flip, start.astype(np.int32), shape.astype(np.int32))


def cumulative_caption_weights(num_captions: int, weights: Sequence[float] | None = None) -> np.ndarray:
    """Caption weights as cumulative probabilities, float64 [num_captions], the last one 1.

    Args:
        weights: a non-negative number per caption in the label's order; None: all alike.

    Raises:
        UserError: another count of weights, a negative or infinite one, or none above 0.
    """
    weights = np.ones(num_captions) if weights is None else np.asarray(weights, np.float64)
    if weights.shape != (num_captions,):
        raise UserError(f"{weights.size} caption weights were given and each record has {num_captions} captions")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
        raise UserError(f"caption weights must be 0 or more, and one above 0; got {weights.tolist()}")
    cumulative = np.cumsum(weights) / weights.sum()
    # Exactly 1 from the last caption of weight above 0 on, so that none of weight 0 is ever drawn.
    cumulative[np.flatnonzero(weights)[-1] :] = 1.0
    return cumulative


def _impossible_crops(height: np.ndarray, width: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Crops [n, 2] of pictures so long that no allowed aspect reaches the smallest area, and a mask of those."""
    max_height, max_width = _longest(height, width)
    too_wide = height * max_width < AREA[0] * height * width
    too_tall = ~too_wide & (width * max_height < AREA[0] * height * width)
    shape = np.zeros((len(height), 2), np.int64)
    shape[too_wide] = np.stack([height, max_width], 1)[too_wide]
    shape[too_tall] = np.stack([max_height, width], 1)[too_tall]
    return shape, too_wide | too_tall


def _longest(height: np.ndarray, width: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Height and width in pixels that the extreme aspects allow beside the whole other side."""
    return np.maximum(1, (width / ASPECT[0]).astype(np.int64)), np.maximum(1, (height * ASPECT[1]).astype(np.int64))


def _try_attempts(
    shape: np.ndarray, found: np.ndarray, height: np.ndarray, width: np.ndarray, uniforms: np.ndarray
) -> None:
    """Fill `shape` and `found`, where not yet found, with the first attempt that fits; `uniforms` [n, 2 x attempts]."""
    area = AREA[0] + (AREA[1] - AREA[0]) * uniforms[:, 0::2].astype(np.float64)
    # Aspects are uniform in their logarithm, so that wide and tall crops are alike.
    half_log = 0.5 * (np.log(ASPECT[0]) + np.log(ASPECT[1] / ASPECT[0]) * uniforms[:, 1::2].astype(np.float64))
    side = np.sqrt(area * (height * width)[:, None])
    tilt = np.exp(half_log)
    crop_width = np.maximum(1, np.floor(side * tilt + 0.5))
    crop_height = np.maximum(1, np.floor(side / tilt + 0.5))
    aspect = crop_width / crop_height
    fits = (crop_width <= width[:, None]) & (crop_height <= height[:, None])
    fits &= (aspect >= ASPECT[0]) & (aspect <= ASPECT[1])
    new = np.flatnonzero(fits.any(1) & ~found)
    first = fits[new].argmax(1)
    shape[new, 0] = crop_height[new, first]
    shape[new, 1] = crop_width[new, first]
    found[new] = True


def _fallback(height: np.ndarray, width: np.ndarray) -> np.ndarray:
    """The crop [n, 2] when every attempt failed: the whole picture, cut to the allowed aspects."""
    max_height, max_width = _longest(height, width)
    aspect = width / height
    crop_height = np.where(aspect < ASPECT[0], np.minimum(max_height, height), height)
    crop_width = np.where(aspect > ASPECT[1], np.minimum(max_width, width), width)
    scale = np.sqrt(np.minimum(1.0, AREA[1] * height * width / (crop_height * crop_width)))
    return np.maximum(1, (np.stack([crop_height, crop_width], 1) * scale[:, None]).astype(np.int64))
