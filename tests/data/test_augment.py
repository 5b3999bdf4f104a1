"""The crop's distribution is the published one, and every choice is a function of (seed, epoch, id)."""

from __future__ import annotations

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn

from rwkv_clip.data.augment import ASPECT, ATTEMPTS, choose, cumulative_caption_weights
from rwkv_clip.model.transform import CROP_AREA

SAMPLES = 8192
WEIGHTS = cumulative_caption_weights(3)


def our_crops(height: int, width: int) -> np.ndarray:
    """y, x, height, width [SAMPLES, 4]."""
    choices = choose(3, 1, np.arange(SAMPLES), np.tile([height, width], (SAMPLES, 1)), WEIGHTS)
    return np.concatenate([choices.crop_start, choices.crop_shape], 1)


def dali_crops(height: int, width: int) -> np.ndarray:
    """The same from the generator behind DALI's image_random_crop."""
    pipeline = Pipeline(SAMPLES, num_threads=1, device_id=None, seed=11, prefetch_queue_depth=1)
    with pipeline:
        shape = fn.external_source(name="shape", ndim=1)
        pipeline.set_outputs(
            *fn.random_crop_generator(shape, random_area=CROP_AREA, random_aspect_ratio=ASPECT, num_attempts=ATTEMPTS)
        )
    start, crop = pipeline.run(shape=np.tile(np.int64([height, width]), (SAMPLES, 1)))
    return np.concatenate([np.asarray(start.as_tensor()), np.asarray(crop.as_tensor())], 1)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov-Smirnov: the largest difference of the two cumulative distributions."""
    values = np.union1d(a, b)
    cumulative = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (a, b)]
    return float(np.abs(cumulative[0] - cumulative[1]).max())


# 4:3, 3:2 and 16:9 (where nearly every attempt fails), portrait, square, longer than any crop may be, tiny.
SHAPES = [(375, 500), (400, 600), (360, 640), (640, 361), (224, 224), (100, 1000), (600, 100), (5, 7), (1, 600), (1, 1)]


@pytest.mark.parametrize("height,width", SHAPES)
def test_crops_are_distributed_as_those_of_dalis_random_crop(height, width):
    ours, dalis = our_crops(height, width), dali_crops(height, width)
    assert (ours[:, :2] >= 0).all() and (ours[:, :2] + ours[:, 2:] <= [height, width]).all()
    assert (ours[:, 2:] >= 1).all()
    # Two samples of this size from one distribution differ by more than 0.03 once in a thousand times.
    for column, name in enumerate(["y", "x", "height", "width"]):
        assert distance(ours[:, column], dalis[:, column]) < 0.03, name
    for of, name in ((lambda c: c[:, 2] * c[:, 3], "area"), (lambda c: c[:, 3] / c[:, 2], "aspect")):
        assert distance(of(ours), of(dalis)) < 0.03, name


def test_crops_flips_and_captions_do_not_depend_on_the_batch_around_them():
    shapes = np.random.default_rng(0).integers(1, 700, (500, 2))
    ids = np.random.default_rng(1).permutation(10_000)[:500]
    whole = choose(9, 4, ids, shapes, WEIGHTS)
    part = slice(123, 130)
    for found, expected in zip(choose(9, 4, ids[part], shapes[part], WEIGHTS), whole, strict=True):
        assert np.array_equal(found, expected[part])
    other_epoch, other_seed = choose(9, 5, ids, shapes, WEIGHTS), choose(8, 4, ids, shapes, WEIGHTS)
    for other in (other_epoch, other_seed):
        assert (other.crop_start != whole.crop_start).any(1).mean() > 0.8


def test_half_of_the_pictures_are_flipped_independently_of_the_caption():
    choices = choose(0, 0, np.arange(SAMPLES), np.tile([10, 10], (SAMPLES, 1)), WEIGHTS)
    assert abs(choices.flip.mean() - 0.5) < 0.02
    for caption in range(3):
        assert abs(choices.flip[choices.caption == caption].mean() - 0.5) < 0.04


def test_caption_weights_are_kept_and_a_weight_of_zero_is_never_drawn():
    weights = cumulative_caption_weights(4, [1, 0, 2, 0])
    caption = choose(0, 0, np.arange(SAMPLES), np.tile([10, 10], (SAMPLES, 1)), weights).caption
    shares = np.bincount(caption, minlength=4) / SAMPLES
    assert np.allclose(shares, [1 / 3, 0, 2 / 3, 0], atol=0.02) and shares[1] == shares[3] == 0
