"""Records whose image cannot be decoded or is too large: which ones, what to tell the user, what takes their place.

DALI's error names no record. After a failure the batch's records are judged one by one by nvImageCodec, the library
that DALI decodes with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..errors import UserError

# The usual ones, for the words about a header that the decoder refuses; it reads others, too.
_IMAGE_STARTS = (b"\xff\xd8", b"\x89PNG", b"BM", b"II*\0", b"MM\0*", b"RIFF", b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51")
_DECODE_AT_ONCE = 16
# Larger pictures are not decoded: one alone takes more than half a gigabyte, in the middle of a run.
MAX_PIXELS = 64_000_000


def decode_faults(payloads: Sequence[memoryview | bytes], num_threads: int = 2) -> list[str | None]:
    """Judge encoded images by decoding them fully, on the CPU, as strictly as the training pipeline.

    Returns:
        Per payload None if it decodes, or why not, in a few words.
    """
    from nvidia import nvimgcodec

    decoder = nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=num_threads,
        backends=[nvimgcodec.Backend(nvimgcodec.CPU_ONLY)],
    )
    faults: list[str | None] = []
    for first in range(0, len(payloads), _DECODE_AT_ONCE):
        faults += _judge(nvimgcodec, decoder, payloads[first : first + _DECODE_AT_ONCE])
    return faults


def _judge(nvimgcodec, decoder, payloads: Sequence[memoryview | bytes]) -> list[str | None]:
    faults: list[str | None] = [None] * len(payloads)
    streams = {}
    for i, payload in enumerate(payloads):
        start = bytes(payload[:8])
        if not start:
            faults[i] = "it is empty"
        else:
            try:
                stream = nvimgcodec.CodeStream(bytes(payload))
                if too_large(stream.height, stream.width):
                    size = f"{stream.width} x {stream.height} pixels"
                    faults[i] = f"it has {size}, more than {MAX_PIXELS // 10**6} million"
                else:
                    streams[i] = stream
            except Exception:  # the library raises its own kinds, and its words name no cause
                known = start.startswith(_IMAGE_STARTS)
                faults[i] = (
                    "its header is broken" if known else f"it starts with {start!r}, no format that can be decoded"
                )
    for i, image in zip(streams, decoder.decode(list(streams.values())), strict=True):
        if image is None:
            faults[i] = "it is damaged or cut short"
    return faults


def too_large(height: int | np.ndarray, width: int | np.ndarray) -> bool | np.ndarray:
    """Whether pictures of so many pixels are left undecoded."""
    return height * width > MAX_PIXELS


def bad_record_error(description: str, fault: str, others: int = 0) -> UserError:
    """The error for a record that `description` (file and key) names."""
    more = f" ({others} more in this batch)" if others else ""
    return UserError(
        f"{description} holds an image that cannot be decoded: {fault}{more}; write a clean copy with "
        f"`rwkv-clip inspect --repair OUT`, or train with `--on-bad-record skip`"
    )


def replacement(bad: int, all_bad: Collection[int], batch: Collection[int], num_records: int) -> int:
    """The record that stands in for `bad`: the next one in the data set's order (the first follows the last) that is
    not bad itself and not in the same global batch, or in the batch if every good record is.

    It depends on no rank, so every number of ranks trains on the same records and takes the same steps. The record
    comes once more in that epoch than the others.

    Raises:
        UserError: no good record is left.
    """
    in_batch = None
    for distance in range(1, num_records):
        candidate = (bad + distance) % num_records
        if candidate not in all_bad:
            if candidate not in batch:
                return candidate
            in_batch = candidate if in_batch is None else in_batch
    if in_batch is None:
        raise UserError(f"none of the {num_records} records can be decoded: check them with `rwkv-clip inspect`")
    return in_batch


def replace_bad(ids: np.ndarray, batch: np.ndarray, all_bad: Collection[int], num_records: int) -> np.ndarray:
    """`ids` int64 [n] of a rank's part of the global batch `batch`, with stand-ins for the bad ones."""
    if not all_bad or not (is_bad := np.isin(ids, np.fromiter(all_bad, np.int64))).any():
        return ids
    in_batch = set(batch.tolist())
    ids = ids.copy()
    for i in np.flatnonzero(is_bad).tolist():
        ids[i] = replacement(int(ids[i]), all_bad, in_batch, num_records)
    return ids
