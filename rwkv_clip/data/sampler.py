"""Which records make up global batch s of epoch e: a pure function of (seed, epoch, step), in modest memory.

Rules, for N records, global batches of G and S steps per epoch (N // G, or fewer on request):

- The shards are cut into runs of up to a quarter window of consecutive records; the seed puts the runs in one order
  for all epochs, the *line* of N records.
- Epoch e takes the S·G places of the line from e·S·G on, cyclically. So no record comes twice in an epoch, what an
  epoch leaves out is the first thing that the next one takes, and after E epochs every record has been seen
  ⌊E·S·G / N⌋ or ⌈E·S·G / N⌉ times.
- Within the epoch the runs are permuted, then records are shuffled inside windows of 16,384. Disks read runs of
  thousands of neighbouring records, and memory holds the list of runs and one window, whatever N is.

The number of ranks is no argument: each rank takes its slice of the global batch. All randomness is hashing with the
finaliser of SplitMix64 (Steele, Lea, Flood 2014, with Stafford's constants), so it is the same with every numpy.
"""

from __future__ import annotations

import threading

import numpy as np

from ..errors import UserError

WINDOW = 16384
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Separate streams for separate purposes.
_LINE, _RUNS, _WINDOW, _SAMPLE = 1, 2, 3, 4


class Sampler:
    """Deterministic order of records.

    Args:
        shard_sizes: records per shard; global ids count through the shards in this order.
        seed: any integer.
        global_batch_size: ranks x micro batch x accumulation steps.
        window: records shuffled among each other.
        max_steps_per_epoch: shorter epochs; the next one goes on where this one stopped.
        world_size: ranks, for messages and to check that they share a batch evenly.

    Attributes:
        num_records, steps_per_epoch.

    Raises:
        UserError: the data do not fill one global batch, the ranks do not divide it, or a number is below 1.
    """

    def __init__(
        self,
        shard_sizes: list[int],
        seed: int,
        global_batch_size: int,
        window: int = WINDOW,
        max_steps_per_epoch: int | None = None,
        world_size: int = 1,
    ):
        self.num_records = int(sum(shard_sizes))
        self.global_batch_size = int(global_batch_size)
        self.window = int(window)
        self._seed = int(seed)
        if self.window < 1:
            raise UserError(f"a shuffle window of {window} records is empty: give 1 or more ({WINDOW} by default)")
        if self.global_batch_size < 1 or self.global_batch_size % world_size:
            raise UserError(f"a global batch of {global_batch_size} records cannot be shared by {world_size} ranks")
        if self.global_batch_size > self.num_records:
            raise UserError(
                f"the data hold {self.num_records} records and one global batch needs {self.global_batch_size} "
                f"({world_size} ranks x {self.global_batch_size // world_size} per rank): take a smaller batch, fewer "
                f"ranks or more data"
            )
        self.steps_per_epoch = self.num_records // self.global_batch_size
        if max_steps_per_epoch is not None:
            if max_steps_per_epoch < 1:
                raise UserError(f"an epoch of {max_steps_per_epoch} steps is empty: give 1 or more")
            self.steps_per_epoch = min(self.steps_per_epoch, int(max_steps_per_epoch))
        starts, lengths = _runs(shard_sizes, max(1, self.window // 4))
        order = _permutation(self._seed, _LINE, 0, 0, len(starts))
        self._run_starts, self._run_lengths = starts[order], lengths[order]
        self._run_places = np.concatenate(([0], np.cumsum(self._run_lengths)))
        self._lock = threading.Lock()
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def batch(self, epoch: int, step: int) -> np.ndarray:
        """Global ids int64 [global_batch_size] of global batch `step` (0 ... steps_per_epoch - 1) of `epoch`."""
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} of epoch {epoch}; an epoch has steps 0 to {self.steps_per_epoch - 1}")
        start = step * self.global_batch_size
        end = start + self.global_batch_size
        pieces = []
        for window in range(start // self.window, (end - 1) // self.window + 1):
            first = window * self.window
            pieces.append(self._window(epoch, window)[max(start - first, 0) : end - first])
        return np.concatenate(pieces)

    def _window(self, epoch: int, window: int) -> np.ndarray:
        """Shuffled global ids of one window of an epoch; the latest two are kept."""
        with self._lock:
            ids = self._windows.get((epoch, window))
            if ids is None:
                starts, places = self._epoch(epoch)
                first = window * self.window
                place = np.arange(first, min(first + self.window, int(places[-1])))
                run = np.searchsorted(places, place, side="right") - 1
                ids = starts[run] + place - places[run]
                ids = ids[_permutation(self._seed, _WINDOW, epoch, window, len(ids))]
                while len(self._windows) >= 2:
                    self._windows.pop(next(iter(self._windows)))
                self._windows[epoch, window] = ids
            return ids

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's runs in order: first ids [R], and places [R + 1] where each begins."""
        if epoch not in self._epochs:
            total = self.steps_per_epoch * self.global_batch_size
            begin = epoch * total % self.num_records
            stretches = [(begin, min(begin + total, self.num_records))]
            if begin + total > self.num_records:
                stretches.append((0, begin + total - self.num_records))
            cut = [self._cut(*stretch) for stretch in stretches]
            starts = np.concatenate([starts for starts, _ in cut])
            lengths = np.concatenate([lengths for _, lengths in cut])
            order = _permutation(self._seed, _RUNS, epoch, 0, len(starts))
            while len(self._epochs) >= 2:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = starts[order], np.concatenate(([0], np.cumsum(lengths[order])))
        return self._epochs[epoch]

    def _cut(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The runs of places begin ... end - 1 of the line: first ids and lengths, the outer runs cut to fit."""
        first = int(np.searchsorted(self._run_places, begin, side="right")) - 1
        last = int(np.searchsorted(self._run_places, end, side="left"))
        places = self._run_places[first : last + 1]
        left = np.maximum(places[:-1], begin)
        right = np.minimum(places[1:], end)
        return self._run_starts[first:last] + left - places[:-1], right - left

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def sample_uniforms(seed: int, epoch: int, ids: np.ndarray, n: int) -> np.ndarray:
    """Uniform numbers of each record in an epoch: float32 [len(ids), n] in [0, 1), multiples of 2^-24.

    A pure function of (seed, epoch, id): the same at any number of ranks and in any batch.
    """
    state = _hash(_stream(seed, _SAMPLE, epoch, 0), np.asarray(ids).astype(np.uint64))
    bits = _hash(state[:, None], np.arange(n, dtype=np.uint64)[None, :])
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _runs(shard_sizes: list[int], run: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut shards into runs of nearly equal length, at most `run`: first ids and lengths."""
    sizes = np.asarray(shard_sizes, np.int64)
    counts = -(-sizes // run)
    shard = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    left = sizes[shard] * number // np.maximum(counts[shard], 1)
    right = sizes[shard] * (number + 1) // np.maximum(counts[shard], 1)
    first = np.cumsum(sizes) - sizes
    return first[shard] + left, right - left


def _permutation(seed: int, purpose: int, epoch: int, number: int, length: int) -> np.ndarray:
    """A permutation of 0 ... length - 1: the order of hashed values."""
    values = _hash(_stream(seed, purpose, epoch, number), np.arange(length, dtype=np.uint64))
    return np.argsort(values, kind="stable")


def _stream(seed: int, *words: int) -> np.ndarray:
    """uint64 [1]: the state that a seed and numbers lead to."""
    state = np.array([seed % 2**64], np.uint64)
    for word in words:
        state = _hash(state, np.array([word % 2**64], np.uint64))
    return state


def _hash(state: np.ndarray, word: np.ndarray) -> np.ndarray:
    """Mix `word` into `state` (both uint64, broadcast)."""
    z = _mix(state + _GOLDEN) ^ (word * _GOLDEN + np.uint64(0xD1B54A32D192ED03))
    return _mix(z)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
