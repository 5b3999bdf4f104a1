"""Batches for training and validation: sampler -> records -> DALI -> tensors on the device.

    sampler = Sampler(dataset.shard_sizes, seed, global_batch_size=2 * 4 * 256)
    loader = Loader(dataset, sampler, rank=rank, world_size=4, micro_batch_size=256, accumulation_steps=2,
                    image_size=224, context_length=77, device=torch.device("cuda", 0), seed=seed)
    for epoch in range(first_epoch, 32):
        for batch in loader.epoch(epoch, start_step=...):     # accumulation_steps batches per optimizer step
            ...                                               # launch work for the device
            loader.work_ahead()                               # while it computes

A position is (epoch, step): every choice is a pure function of it and the seed, so a loader that starts at any
position gives exactly what an uninterrupted one gives there. `state_dict` holds what was found out on the way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from .augment import choose, cumulative_caption_weights
from .bad_records import bad_record_error, decode_faults, too_large
from .batch_plan import EvalPlan, PlannedBatch, Position, TrainPlan
from .batch_reader import BatchReader, EncodedBatch
from .dataset import CONTEXT_LENGTH, Dataset
from .pipeline import (
    DecoderSettings,
    FedPipeline,
    Normalise,
    encoded_list,
    eval_pipeline,
    eval_regions,
    shape_pipeline,
    train_pipeline,
)
from .sampler import Sampler
from .tokenizer import shorten

logger = logging.getLogger(__name__)

# Batches that are brought into memory, and whose picture sizes are looked up, ahead of decoding.
_SHAPES_AHEAD = 4


@dataclass
class Batch:
    """One micro batch of one rank.

    Attributes:
        images: [B, 3, image_size, image_size] in the loader's dtype, normalised, on the device.
        tokens: int64 [B, context_length], on the device.
        caption_index: int64 [B], on the device: which of the record's captions `tokens` is.
        ids: int64 [B], CPU: global record ids.
        valid: bool [B], CPU: False for padding at the end of a validation pass; all True in training.
    """

    images: Tensor
    tokens: Tensor
    caption_index: Tensor
    ids: Tensor
    valid: Tensor


@dataclass
class _InFlight:
    """A batch between its records and its tensors; holds the memory that DALI reads."""

    planned: PlannedBatch
    records: EncodedBatch
    encoded: object
    inputs: dict[str, np.ndarray] | None = None


class Loader:
    """Gives one rank its batches.

    Args:
        dataset: the records.
        sampler: order of training records, its global batch = micro_batch_size x accumulation_steps x world_size;
            None for validation.
        rank, world_size: of the data-parallel group.
        micro_batch_size: records per batch of this rank.
        image_size: side of the square images in pixels.
        context_length: tokens per caption that the model takes, at most the 77 stored.
        device: where batches go; images are decoded there too.
        dtype: of the images, which are normalised in float32.
        train: False for validation: every record once, in order, over all ranks; the published evaluation's resize
            and centre crop; one fixed caption; the last batches are padded (see `Batch.valid`).
        seed: of crops, flips and captions.
        accumulation_steps: micro batches per optimizer step.
        caption_weights: chance of each caption in training, in the label's order; None: all alike.
        eval_caption: caption for validation; None: the last (the generated description of published data).
        settings: decoding threads, prefetch and memory.
        on_bad_record: "raise" stops with a UserError that names the record; "skip" trains on the next record of the
            data set in its place (see `bad_records.replacement`), which changes no step count.

    Raises:
        UserError: a setting that does not go with the data.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler | None,
        *,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        image_size: int,
        context_length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        train: bool = True,
        seed: int = 0,
        accumulation_steps: int = 1,
        caption_weights: Sequence[float] | None = None,
        eval_caption: int | None = None,
        settings: DecoderSettings | None = None,
        on_bad_record: str = "raise",
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be 0 to {world_size - 1}, got {rank}")
        if on_bad_record not in ("raise", "skip"):
            raise UserError(f"on-bad-record is raise or skip, got {on_bad_record!r}")
        if not 3 <= context_length <= CONTEXT_LENGTH:
            raise UserError(
                f"the model's context length {context_length} does not fit the data, which hold {CONTEXT_LENGTH} "
                f"tokens per caption: take a model of 3 to {CONTEXT_LENGTH}"
            )
        self.dataset = dataset
        self.train = train
        self.accumulation_steps = accumulation_steps if train else 1
        self.bad_records: dict[int, str] = {}
        self.num_replaced = 0
        if train:
            self._plan = TrainPlan(sampler, rank, world_size, micro_batch_size, accumulation_steps)
            self._weights = cumulative_caption_weights(dataset.num_captions, caption_weights)
        else:
            self._plan = EvalPlan(len(dataset), rank, world_size, micro_batch_size)
            self._eval_caption = dataset.num_captions - 1 if eval_caption is None else eval_caption
            if not 0 <= self._eval_caption < dataset.num_captions:
                raise UserError(
                    f"caption {self._eval_caption} was asked for validation and records have captions 0 to "
                    f"{dataset.num_captions - 1}"
                )
        self.steps_per_epoch = self._plan.steps_per_epoch
        self._micro_batch_size, self._image_size, self._device = micro_batch_size, image_size, device
        self._normalise = Normalise(device, dtype)
        self._context_length, self._seed, self._skip_bad = context_length, seed, on_bad_record == "skip"
        self._settings = settings or DecoderSettings()
        self._reader = BatchReader(dataset)
        self._pass_number = 0
        # A batch goes through these: picture sizes looked up, decoded.
        self._next: Position | None = None
        self._shapes: FedPipeline | None = None
        self._peeking: deque[_InFlight] = deque()
        self._decoder: FedPipeline | None = None
        self._decoding: deque[_InFlight] = deque()
        self._failure: tuple[_InFlight | None, Exception] | None = None

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Batches of `epoch` from optimizer step `start_step` on, `accumulation_steps` per step.

        Batches of the next epoch are made ahead while the last ones of this one are used. A new call ends an older
        iterator.

        Raises:
            UserError: a record cannot be read or, unless bad ones are skipped, decoded.
        """
        if epoch < 0 or not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"no step {start_step} of epoch {epoch}: an epoch has {self.steps_per_epoch} steps")
        self._pass_number += 1
        return self._iterate(self._pass_number, epoch, start_step)

    def _iterate(self, pass_number: int, epoch: int, start_step: int) -> Iterator[Batch]:
        self._seek(Position(epoch, start_step, 0))
        for _ in range((self.steps_per_epoch - start_step) * self.accumulation_steps):
            if pass_number != self._pass_number:
                raise RuntimeError("this iterator ended when loader.epoch was called again")
            yield self._take()
        if not self.train:
            self._stop()

    def work_ahead(self) -> None:
        """Feed the decoder what it has room for, which is most of what a batch costs the calling thread.

        Call it when that thread has time to spare; otherwise asking for the next batch does it first. A record that
        cannot be read is spoken of when its batch is asked for.
        """
        if self._decoder is not None:
            self._fill()

    def state_dict(self) -> dict:
        """What this rank has found out beside its position: the bad records it met. Plain values."""
        return {"bad_records": {str(i): fault for i, fault in self.bad_records.items()}}

    def load_state_dicts(self, states: Iterable[dict]) -> None:
        """Take over the `state_dict` of every rank of the saved run, so that a resume skips what that run skipped."""
        for state in states:
            self.bad_records.update({int(i): fault for i, fault in state["bad_records"].items()})

    def close(self) -> None:
        """End the decoding threads and free their memory; batches handed out stay valid."""
        self._pass_number += 1
        self._stop()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _seek(self, position: Position) -> None:
        """Make `position` the next batch: nothing to do where the last epoch ended, otherwise start anew."""
        if position.step == self.steps_per_epoch:
            return
        oldest = next(iter([*self._decoding, *self._peeking]), None)
        if oldest is None or oldest.planned.position != position:
            self._start(position)

    def _start(self, position: Position) -> None:
        self._stop()
        size, settings = self._micro_batch_size, self._settings
        make = train_pipeline if self.train else eval_pipeline
        self._decoder = make(size, self._image_size, self._device, settings)
        self._shapes = shape_pipeline(size, _SHAPES_AHEAD)
        self._next = position

    def _stop(self) -> None:
        for part in (self._decoder, self._shapes):
            if part is not None:
                part.close()
        self._decoder = self._shapes = self._next = self._failure = None
        for stage in (self._peeking, self._decoding):
            stage.clear()

    def _take(self) -> Batch:
        """The oldest batch."""
        while True:
            self._fill()
            if not self._decoding:
                self._recover(*self._failure)
                continue
            entry = self._decoding[0]
            try:
                pixels, labels = self._decoder.pop()
            except RuntimeError as error:
                self._recover(entry, error)
                continue
            self._decoding.popleft()
            self.num_replaced += entry.planned.num_replaced
            return self._finish(entry, pixels, labels)

    def _fill(self) -> None:
        """Keep the stages full. What goes wrong is kept until the good batches before it are used up."""
        while len(self._decoding) < self._settings.prefetch:
            if self._failure is None:
                self._read_on()
            if not self._peeking:
                return
            entry = self._peeking.popleft()
            try:
                shapes, _ = self._shapes.pop(np.array)
                if too_large(shapes[:, 0], shapes[:, 1]).any():
                    raise RuntimeError("a picture is too large to be decoded")
            except RuntimeError as error:
                self._failure = (entry, error)
                self._peeking.clear()
                return
            self._push_choices(entry, shapes[:, :2])

    def _read_on(self) -> None:
        while len(self._peeking) < _SHAPES_AHEAD and self._next is not None:
            planned = self._plan.at(self._next, self.bad_records)
            self._next = self._plan.after(self._next)
            try:
                records = self._reader.read(planned.ids)
            except UserError as error:
                self._failure = (None, error)
                return
            self._peeking.append(_InFlight(planned, records, encoded_list(records.payloads)))
            self._shapes.push(encoded=self._peeking[-1].encoded)

    def _push_choices(self, entry: _InFlight, image_shapes: np.ndarray) -> None:
        if self.train:
            choices = choose(self._seed, entry.planned.position.epoch, entry.planned.ids, image_shapes, self._weights)
            caption_index = choices.caption
            columns = (choices.crop_start, choices.crop_shape, choices.flip[:, None])
            inputs = {"choices": np.concatenate(columns, 1)}
        else:
            start, end = eval_regions(image_shapes, self._image_size)
            caption_index = np.full(len(image_shapes), self._eval_caption)
            inputs = {"region_start": start, "region_end": end}
        # The chosen captions alone, and which they are, travel to the device with the images.
        captions = entry.records.labels.reshape(len(caption_index), self.dataset.num_captions, CONTEXT_LENGTH)
        chosen = captions[np.arange(len(caption_index)), caption_index]
        labels = np.concatenate((chosen, caption_index[:, None]), 1, dtype=np.float32)
        entry.inputs = inputs | {"labels": labels}
        self._decoder.push(encoded=entry.encoded, **entry.inputs)
        self._decoding.append(entry)

    def _finish(self, entry: _InFlight, pixels: Tensor, labels: Tensor) -> Batch:
        tokens = shorten(labels[:, :CONTEXT_LENGTH].to(torch.int64), self._context_length)
        caption_index = labels[:, CONTEXT_LENGTH].to(torch.int64)
        ids, valid = torch.from_numpy(entry.planned.ids), torch.from_numpy(entry.planned.valid)
        # DALI has its memory back at once, not when the device is through with all that uses the batch.
        return Batch(self._normalise(pixels), tokens, caption_index, ids, valid)

    # Records that cannot be decoded.

    def _recover(self, entry: _InFlight | None, error: Exception) -> None:
        """Start again at `entry` with its bad records replaced, or raise what is wrong."""
        if entry is None:
            self._stop()
            raise error
        faults = decode_faults(entry.records.payloads, self._settings.num_threads)
        bad = {int(i): fault for i, fault in zip(entry.planned.ids.tolist(), faults, strict=True) if fault is not None}
        self._stop()
        if not bad:
            raise error
        first = next(iter(bad))
        if not self._skip_bad:
            raise bad_record_error(self.dataset.describe(first), bad[first], others=len(bad) - 1) from error
        for i, fault in bad.items():
            logger.warning("skipping %s, whose image cannot be decoded: %s", self.dataset.describe(i), fault)
        self.bad_records.update(bad)
        self._start(entry.planned.position)


def check_input_size(input_size: int | None, model_size: int, model_name: str) -> None:
    """Refuse an `--input-size` other than the model's.

    Raises:
        UserError: they differ.
    """
    if input_size not in (None, model_size):
        raise UserError(
            f"--input-size {input_size} does not fit {model_name}, which takes {model_size} x {model_size} pixels: "
            f"leave the flag out, or take another model"
        )
