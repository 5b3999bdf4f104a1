"""CLIP's byte-pair tokens, the same ids as the published tokenizer gives.

The merges run in Rust (instant-clip-tokenizer, vocabulary inside). What the published code does before them is done
here: ftfy, HTML entities undone twice, white space folded, lower case. A caption that spells a special token such as
`<end_of_text>` gets that token's id, as published; the end token that closes the caption still comes last.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UserError

if TYPE_CHECKING:
    import torch

CONTEXT_LENGTH = 77
START_TOKEN = 49406
END_TOKEN = 49407
VOCABULARY_SIZE = 49408
NAME = "clip-bpe-49408"


@functools.lru_cache(maxsize=1)
def _tokenizer():
    try:
        from instant_clip_tokenizer import Tokenizer
    except ImportError as error:
        raise UserError(
            f"the tokenizer cannot be imported ({error}): run `pip install instant-clip-tokenizer ftfy`"
        ) from None
    return Tokenizer()


def clean(text: str) -> str:
    """One caption as the published tokenizer sees it: repaired, unescaped, on one line, in lower case.

    A lone surrogate becomes U+FFFD, so that the result can always be written as UTF-8.
    """
    # ftfy changes nothing in printable ASCII without an entity, and takes most of the time.
    if not (text.isascii() and text.isprintable() and "&" not in text):
        import ftfy

        text = html.unescape(html.unescape(ftfy.fix_text(text)))
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(text.split()).lower()


def tokenize_numpy(texts: str | list[str], context_length: int = CONTEXT_LENGTH) -> np.ndarray:
    """Token ids, uint16 [N, context_length]: start token, ids, end token, then zeros.

    A caption that is too long keeps its first ids and has the end token last. An empty one is start, end, zeros.

    Raises:
        ValueError: `texts` is not a string or a list of strings, or `context_length` is below 3.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"tokenize takes a string or a list of strings, got a {type(text).__name__}: {text!r}")
    if context_length < 3:
        raise ValueError(f"context_length must be 3 or more (start, one id, end), got {context_length}")
    if not texts:
        return np.zeros((0, context_length), np.uint16)
    return _tokenizer().tokenize_batch([clean(text) for text in texts], context_length)


def tokenize(texts: str | list[str], context_length: int = CONTEXT_LENGTH) -> torch.Tensor:
    """Token ids as `tokenize_numpy` gives them, int64 tensor [N, context_length]."""
    import torch

    return torch.from_numpy(tokenize_numpy(texts, context_length).astype(np.int64))


def decode(tokens: Sequence[int] | np.ndarray) -> list[str]:
    """Captions as text, as the tokenizer saw them: in lower case, without start and end token and what follows it.

    Args:
        tokens: ids [..., T] of one caption or of several, of any dtype that holds them.

    Raises:
        ValueError: an id that is none of the vocabulary.
    """
    captions = np.atleast_2d(np.asarray(tokens).astype(np.int64))
    texts = []
    for caption in captions.reshape(-1, captions.shape[-1]):
        filled = np.flatnonzero(caption)
        ids = caption[: filled[-1] + 1].tolist() if len(filled) else []
        if not all(0 <= i < VOCABULARY_SIZE for i in ids):
            raise ValueError(f"token ids are 0 to {VOCABULARY_SIZE - 1}, got {min(ids)} to {max(ids)}")
        ids = ids[1:] if ids[:1] == [START_TOKEN] else ids
        ids = ids[:-1] if ids[-1:] == [END_TOKEN] else ids
        texts.append(_tokenizer().decode(ids).strip() if ids else "")
    return texts


def shorten(tokens: torch.Tensor, context_length: int) -> torch.Tensor:
    """Captions for a model with a shorter context: the first `context_length` ids, the end token last.

    Args:
        tokens: whole captions [..., T] on any device, of any integer dtype.
        context_length: at most T.

    Returns:
        [..., context_length], the same ids as tokenizing with that context length.

    Raises:
        ValueError: `context_length` is larger than T or below 3.
    """
    width = tokens.shape[-1]
    if not 3 <= context_length <= width:
        raise ValueError(f"context_length must be between 3 and the stored {width}, got {context_length}")
    if context_length == width:
        return tokens
    # Id 0 is also "!", so only what follows tells whether a caption was cut: its end token is its last non-zero id.
    cut = (tokens[..., context_length:] != 0).any(-1)
    short = tokens[..., :context_length].clone()
    short[..., -1] = short[..., -1].masked_fill(cut, END_TOKEN)
    return short
