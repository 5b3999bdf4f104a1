"""What the log says of the DeepSpeed JSON once the engine is built: its optimizer, and keys that do nothing."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from test_shipped_configurations import CONFIG, FOLDER, NAMES

from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.training.arguments import parse_arguments
from rwkv_clip.training.config import read_config, resolve_config
from rwkv_clip.training.config_keys import keys_without_effect
from rwkv_clip.training.engine import build_engine

AT_ONCE = "averaged over the ranks at once"


def logs(configs: list[dict]) -> list[tuple[list[str], str]]:
    """(lines of the log, module of the optimizer) for each JSON."""
    found = []
    for values in configs:
        args = parse_arguments(["--model", "m", "--train-data", "d", "--output", "o", "--batch-size", "4"])
        config, _ = resolve_config(values, args, 1)
        world = SimpleNamespace(device=torch.device("cpu"), place=None)
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
        logger = logging.getLogger("rwkv_clip")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        engine = build_engine(RWKVCLIP(CONFIG), config, args, world, lambda step: 1.0)
        logger.removeHandler(handler)
        found.append((lines, type(engine.basic_optimizer).__module__))
    return found


def test_the_log_names_the_json_s_optimizer_and_keys_without_effect():
    bf16 = {"bf16": {"enabled": True}}
    bucket = {"stage": 1, "reduce_bucket_size": 1000, "contiguous_gradients": True, "allgather_bucket_size": 1000}
    results = run_ranks(
        1,
        logs,
        [
            {**bf16, "zero_optimization": bucket, "prescale_gradients": True, "optimizer": {"type": "AdamW"}},
            {**bf16, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "overlap_comm": True}},
            {"optimizer": {"type": "SGD", "params": {"weight_decay": 0.1}}},
        ],
    )[0]
    (lines, module), (overlapping, _), (sgd, _) = results
    assert module == "torch.optim.adamw"  # DeepSpeed's own would be compiled first
    assert any("optimizer of the DeepSpeed JSON: AdamW of torch" in line for line in lines), lines
    assert any("reduce_bucket_size, contiguous_gradients, prescale_gradients, since" in line for line in lines), lines
    assert any("allgather_bucket_size, since" in line for line in lines)
    assert not any("without effect" in line for line in overlapping)
    assert any("optimizer of the DeepSpeed JSON: SGD" in line for line in sgd)


@pytest.mark.parametrize(
    ("values", "at_once", "keys"),
    [
        ({"zero_optimization": {"stage": 0, "overlap_comm": True}}, False, ["overlap_comm"]),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5, "allgather_partitions": True}}, False,
         ["allgather_partitions"]),
        ({"zero_optimization": {"stage": 1}, "gradient_predivide_factor": 2}, True, ["gradient_predivide_factor"]),
        ({"zero_optimization": {"stage": 1, "ignore_unused_parameters": False}}, True, ["ignore_unused_parameters"]),
        ({"zero_optimization": {"stage": 3, "round_robin_gradients": True, "allgather_bucket_size": 5,
          "sub_group_size": 9, "reduce_bucket_size": 5, "ignore_unused_parameters": False,
          "offload_optimizer": {"device": "cpu"}}}, False,
         ["allgather_bucket_size", "round_robin_gradients", "ignore_unused_parameters"]),
        ({"prescale_gradients": True}, False, []),
    ],
)  # fmt: skip
def test_keys_that_do_nothing_beside_the_others(values, at_once, keys):
    assert sum(keys_without_effect(values, at_once).values(), []) == keys


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_file_has_no_key_without_effect(name):
    section = json.loads((FOLDER / f"{name}.json").read_text()).get("zero_optimization", {})
    at_once = section.get("stage") == 1 and "offload_optimizer" not in section
    assert keys_without_effect(read_config(FOLDER / f"{name}.json"), at_once) == {}
