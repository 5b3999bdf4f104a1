from __future__ import annotations

import numpy as np
import pytest

from rwkv_clip.data.captions import encode_captions
from rwkv_clip.data.sources.base import RowError
from rwkv_clip.data.tokenizer import tokenize_numpy


def rows(label: np.ndarray) -> list[list[int]]:
    return label.reshape(-1, 77).astype(int).tolist()


def test_captions_stand_side_by_side_in_the_label():
    label, filled = encode_captions(["a dog", "a cat", "a cow"], "fill")
    assert label.shape == (231,) and label.dtype == np.float32 and filled == 0
    assert rows(label) == tokenize_numpy(["a dog", "a cat", "a cow"]).tolist()


@pytest.mark.parametrize("missing", [None, "", "  ", "\r\n", "&nbsp;", "\x00\x01"])
def test_a_missing_caption_takes_the_first_that_is_there(missing):
    label, filled = encode_captions([missing, "a cat", missing], "fill")
    assert filled == 2
    assert rows(label) == tokenize_numpy(["a cat"] * 3).tolist()


def test_the_rule_skip_leaves_the_row_out_and_keep_stores_an_empty_caption():
    with pytest.raises(RowError, match="caption 2 of 2"):
        encode_captions(["a dog", ""], "skip")
    label, filled = encode_captions(["a dog", None], "keep")
    assert filled == 0
    assert rows(label)[1][:3] == [49406, 49407, 0]


@pytest.mark.parametrize("rule", ["fill", "skip"])
def test_a_row_without_any_caption_is_left_out(rule):
    with pytest.raises(RowError):
        encode_captions([None, ""], rule)


def test_words_that_other_programs_read_as_missing_are_captions():
    """None, null, nan and NA are words: only a file format's own null is a missing value."""
    words = ["None", "null", "nan", "NA"]
    label, filled = encode_captions(words, "skip")
    assert filled == 0 and rows(label) == tokenize_numpy(words).tolist()


def test_token_ids_are_stored_as_they_are_and_may_stand_beside_text():
    ids = tokenize_numpy(["a dog"])[0]
    label, _ = encode_captions([ids[:4].tolist(), "a dog", ids.astype(np.float32), None], "fill")
    assert rows(label) == [ids.tolist()] * 4


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([320, 1929, 49407], "starts with 320"),
        ([49406, 320, 1929], "ends with 1929"),
        ([49406, 50000, 49407], "outside 0 to 49407"),
        ([49406, -1, 49407], "outside"),
        ([49406, 10**400, 49407], "outside"),
        ([49406, 1.5, 49407], "outside"),
        ([49406] + [1] * 80, "81 ids, at most 77"),
        (["a", "b"], "no list of numbers"),
    ],
)
def test_wrong_token_ids_are_named(ids, reason):
    with pytest.raises(RowError, match=reason):
        encode_captions([ids], "fill")
