"""Which rank a watchdog takes for dead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rwkv_clip.training.watchdog import SILENT_LOOKS, Watchdog


class Left(Exception):
    pass


@pytest.fixture
def watched(monkeypatch) -> SimpleNamespace:
    """The watchdog of rank 0 of two, and the store in which rank 1's heartbeat would be."""
    store = dist.HashStore()
    place = SimpleNamespace()
    world = SimpleNamespace(rank=0, world_size=2, hosts=["a", "b"], is_failing=False, is_first=True, place=place)
    world.connect = lambda: store
    dog = Watchdog(world, SimpleNamespace(requested=False))

    def leave(message: str) -> None:
        raise Left(message)

    monkeypatch.setattr(dog, "_leave", leave)
    return SimpleNamespace(dog=dog, store=store)


def test_a_rank_killed_before_its_first_heartbeat_is_missed(watched: SimpleNamespace) -> None:
    for _ in range(SILENT_LOOKS - 1):
        watched.dog._look()
    with pytest.raises(Left, match=r"rank 1 \(b\) has been silent for 30 s"):
        watched.dog._look()
    assert watched.store.check(["failure"])


def test_a_rank_is_missed_once_its_heartbeat_stops_and_not_before(watched: SimpleNamespace) -> None:
    for beat in range(2 * SILENT_LOOKS):
        watched.store.set("beat/1", str(beat))
        watched.dog._look()
    for _ in range(SILENT_LOOKS - 1):
        watched.dog._look()
    with pytest.raises(Left):
        watched.dog._look()
