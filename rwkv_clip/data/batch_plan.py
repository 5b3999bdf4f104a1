"""Which records make up each micro batch of a rank: positions in a run, and the ids at a position."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from .bad_records import replace_bad
from .sampler import Sampler


class Position(NamedTuple):
    """A micro batch of a run; the same for all ranks."""

    epoch: int
    step: int
    micro_step: int = 0


class PlannedBatch(NamedTuple):
    """The records of one rank's micro batch."""

    position: Position
    ids: np.ndarray  # int64 [B], global ids
    valid: np.ndarray  # bool [B], False for padding
    num_replaced: int  # how many of the ids stand in for bad records


class TrainPlan:
    """The sampler's global batches, each cut into [accumulation step][rank][row].

    Args:
        sampler: its global batch = micro_batch_size x accumulation_steps x world_size.
    """

    def __init__(self, sampler: Sampler, rank: int, world_size: int, micro_batch_size: int, accumulation_steps: int):
        wanted = micro_batch_size * accumulation_steps * world_size
        if sampler.global_batch_size != wanted:
            raise ValueError(f"the sampler's global batch is {sampler.global_batch_size}, the loader's {wanted}")
        self.steps_per_epoch = sampler.steps_per_epoch
        self._sampler, self._rank = sampler, rank
        self._cut = (accumulation_steps, world_size, micro_batch_size)

    def at(self, position: Position, bad_records: Collection[int]) -> PlannedBatch:
        """The records at `position`, with stand-ins for bad ones."""
        batch = self._sampler.batch(position.epoch, position.step)
        planned = batch.reshape(self._cut)[position.micro_step, self._rank]
        ids = replace_bad(planned, batch, bad_records, self._sampler.num_records)
        return PlannedBatch(position, ids, np.ones(len(ids), bool), int((ids != planned).sum()))

    def after(self, position: Position) -> Position:
        """The position that follows, in the next epoch after the last one of an epoch."""
        epoch, step, micro_step = position
        if micro_step + 1 < self._cut[0]:
            return Position(epoch, step, micro_step + 1)
        if step + 1 < self.steps_per_epoch:
            return Position(epoch, step + 1)
        return Position(epoch + 1, 0)


class EvalPlan:
    """Every record once, in order: step s of rank r takes the B records from (s x world_size + r) x B on."""

    def __init__(self, num_records: int, rank: int, world_size: int, micro_batch_size: int):
        self.steps_per_epoch = math.ceil(num_records / (micro_batch_size * world_size))
        self._num_records, self._rank, self._world_size = num_records, rank, world_size
        self._micro_batch_size = micro_batch_size

    def at(self, position: Position, bad_records: Collection[int]) -> PlannedBatch:
        """The records at `position`; what is behind the last record, and bad ones, are padding."""
        first = (position.step * self._world_size + self._rank) * self._micro_batch_size
        planned = np.arange(first, first + self._micro_batch_size)
        valid = planned < self._num_records
        planned = np.where(valid, planned, 0)
        ids = replace_bad(planned, planned, bad_records, self._num_records)
        return PlannedBatch(position, ids, valid & (ids == planned), int((ids != planned)[valid].sum()))

    def after(self, position: Position) -> Position | None:
        """The position that follows, None after the last."""
        return Position(position.epoch, position.step + 1) if position.step + 1 < self.steps_per_epoch else None
