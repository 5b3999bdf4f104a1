"""`launch/train.py` for benchmarks: the same job, whose last steps train on batches that are kept instead of new ones.

`job.py` starts it. RWKV_CLIP_REPLAY_AFTER: step after which kept batches are replayed, so that nothing is decoded and
the difference in speed is what the data path costs. RWKV_CLIP_PEER: path for the figures of open_clip's ViT-B/32,
trained in this process on the same batches once the job's own loop has ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
from collections.abc import Iterator
from pathlib import Path

KEPT = 1
"""Batches to replay. More would take memory that the job itself does not."""


def replay_after(step: int) -> list:
    """Make the training loader repeat the batches before `step`; returns the list that will hold them."""
    from rwkv_clip.data.loader import Batch, Loader

    original = Loader.epoch
    kept: list[Batch] = []
    given = 0

    def epoch(self: Loader, number: int, start_step: int = 0) -> Iterator[Batch]:
        nonlocal given
        fresh = original(self, number, start_step)
        for index in range((self.steps_per_epoch - start_step) * self.accumulation_steps):
            given += 1
            if given > step * self.accumulation_steps:
                yield kept[index % len(kept)]
                continue
            batch = next(fresh)
            if given > step * self.accumulation_steps - KEPT:
                # The pipeline takes its memory back.
                tensors = {name: getattr(batch, name).clone() for name in ("images", "tokens", "caption_index")}
                kept.append(dataclasses.replace(batch, **tensors))
            yield batch

    Loader.epoch = epoch
    return kept


def peer_at_the_end(kept: list, path: Path) -> None:
    """Train the peer when the loop has ended, and write its figures."""
    from rwkv_clip.training.loop import Loop

    original = Loop.run

    def run(self: Loop) -> bool:
        completed = original(self)
        from peer import measure

        path.write_text(json.dumps(measure([(batch.images, batch.tokens) for batch in kept])))
        return completed

    Loop.run = run


if __name__ == "__main__":
    kept = replay_after(int(os.environ["RWKV_CLIP_REPLAY_AFTER"]))
    if os.environ.get("RWKV_CLIP_PEER"):
        peer_at_the_end(kept, Path(os.environ["RWKV_CLIP_PEER"]))
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "launch" / "train.py"), run_name="__main__")
