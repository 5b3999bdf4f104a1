"""A tiny model and prepared folders whose right answers it can be given."""

from __future__ import annotations

import json
import sys

import pytest
from evaluation_folder import COLOURS, make_model, write_table

from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.ops.implementation import Implementation
from rwkv_clip.ops.wkv6_torch import wkv6_torch_backward, wkv6_torch_forward


@pytest.fixture(autouse=True)
def plain_operator(monkeypatch):
    """The plain operator, which needs no compiler."""
    plain = Implementation("torch", wkv6_torch_forward, wkv6_torch_backward)
    monkeypatch.setattr(sys.modules["rwkv_clip.ops.wkv6"], "implementation", lambda device_type: plain)
    monkeypatch.setattr("rwkv_clip.ops.prepare", lambda device_type: "torch")


@pytest.fixture(scope="session")
def model() -> RWKVCLIP:
    return make_model()


@pytest.fixture
def folder(tmp_path):
    """4 pictures in a zero-shot and a retrieval set, as `rwkv-clip prepare` lays them out."""
    from PIL import Image

    (tmp_path / "images").mkdir()
    for name, colour in COLOURS.items():
        Image.new("RGB", (24, 20), colour).save(tmp_path / "images" / f"{name}.png")
    rows = [f"images/{name}.png\t{label}\ta {name} wall" for label, name in enumerate(COLOURS)]
    write_table(tmp_path / "zs_walls.tsv", "image\tlabel\tclass_name", rows)
    description = {"classes": [f"a {name} wall" for name in COLOURS], "templates": ["a photo of {}.", "{}"]}
    (tmp_path / "zs_walls.json").write_text(json.dumps(description))
    rows = [f"images/{name}.png\ta {name} wall\twall, {name}" for name in COLOURS]
    write_table(tmp_path / "retrieval_walls.tsv", "image\tcaption\tcaption2", rows)
    return tmp_path
