from __future__ import annotations

import html
import json

import ftfy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_clip.data import tokenizer
from rwkv_clip.data.tokenizer import END_TOKEN, START_TOKEN, clean, decode, shorten, tokenize, tokenize_numpy
from rwkv_clip.errors import UserError


@pytest.fixture(scope="module")
def expected(fixtures) -> dict[str, dict]:
    return json.loads((fixtures / "tokens_expected.json").read_text(encoding="utf-8"))


def padded(ids: list[int]) -> list[int]:
    return ids + [0] * (77 - len(ids))


def check(expected: dict, *names: str) -> None:
    for name in names:
        assert tokenize(expected[name]["caption"])[0].tolist() == padded(expected[name]["ids"]), name


def test_every_caption_of_the_fixture_gets_the_published_ids(expected):
    assert len(expected) == 42
    check(expected, *expected)


def test_T1_a_long_caption_is_77_ids_with_the_end_token_last(expected):
    check(expected, "len200", "url")
    ids = tokenize(expected["len200"]["caption"])
    assert ids.shape == (1, 77) and ids.dtype == torch.int64
    assert ids[0, 0] == START_TOKEN and ids[0, -1] == END_TOKEN


def test_T3_entities_mojibake_quotes_and_line_breaks_are_cleaned_as_published(expected):
    check(expected, "html_double", "html_nbsp", "mojibake", "curly", "newline_tab")


def test_T5_an_empty_caption_is_start_and_end_alone(expected):
    check(expected, "empty", "spaces", "crlf_only")
    assert tokenize(["", "  ", "\r\n"])[:, :3].tolist() == [[49406, 49407, 0]] * 3


def test_T6_a_special_token_spelt_in_a_caption_is_read_as_published(expected):
    check(expected, "special_eot", "special_sot", "special_upper", "special_eot_oai")


def test_T7_a_lone_surrogate_becomes_the_replacement_character():
    assert clean("lone \ud83d surrogate") == "lone \ufffd surrogate"
    assert (tokenize("lone \ud83d surrogate") == tokenize("lone \ufffd surrogate")).all()
    assert 10631 in tokenize("pair \ud83d\udc36 ok")[0].tolist()
    assert (tokenize("pair \ud83d\udc36 ok") == tokenize("pair 🐶 ok")).all()


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(min_codepoint=0, max_codepoint=0x3FF), max_size=60))
def test_the_short_way_for_plain_text_cleans_like_the_long_way(text):
    long_way = " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()).lower()
    assert clean(text) == long_way


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_any_text_gives_ids_in_range_framed_by_start_and_end(text):
    ids = tokenize_numpy(text)[0]
    assert ids[0] == START_TOKEN and ids.max() <= END_TOKEN
    assert ids[np.flatnonzero(ids)[-1]] == END_TOKEN


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab!? é<end_of_text>", max_size=200), st.integers(3, 77))
def test_shortening_stored_ids_equals_tokenizing_with_the_shorter_context(text, context_length):
    assert (shorten(tokenize(text), context_length) == tokenize(text, context_length)).all()


def test_ids_are_read_back_as_the_text_that_the_tokenizer_saw():
    ids = tokenize_numpy(["A dog, on a beach!", "", "!", "don&#39;t"])
    texts = ["a dog , on a beach !", "", "!", "don 't"]
    assert [" ".join(text.split()) for text in decode(ids)] == texts
    assert decode(ids.astype(np.float32)) == decode(ids) == decode(torch.from_numpy(ids.astype(np.int64)).numpy())
    assert decode(ids[0]) == decode(ids[:1]) and decode(ids[0, :4].tolist())[0].split() == ["a", "dog", ","]
    with pytest.raises(ValueError, match="token ids are 0 to 49407, got 3 to 49408"):
        decode([3, 49408])


def test_shorten_keeps_leading_dimensions_and_refuses_a_longer_context():
    tokens = tokenize(["word " * 100, "short", ""]).reshape(1, 3, 77)
    assert shorten(tokens, 40).shape == (1, 3, 40)
    assert shorten(tokens, 40)[0, 0, -1] == END_TOKEN
    with pytest.raises(ValueError, match="stored 77, got 78"):
        shorten(tokens, 78)


def test_what_is_no_string_is_refused_with_its_value():
    with pytest.raises(ValueError, match="float: 1.5"):
        tokenize(["fine", 1.5])
    assert tokenize([]).shape == (0, 77)


def test_a_missing_tokenizer_package_names_the_install_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "instant_clip_tokenizer", None)
    tokenizer._tokenizer.cache_clear()
    with pytest.raises(UserError, match="pip install instant-clip-tokenizer"):
        tokenize("a dog")
    tokenizer._tokenizer.cache_clear()
