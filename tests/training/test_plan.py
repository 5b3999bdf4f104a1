"""What is refused before a model is built, where several parts of a job must fit together."""

import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rwkv_clip import create_model
from rwkv_clip.errors import UserError
from rwkv_clip.model.config import load_config
from rwkv_clip.model.published import published_state_dict, save
from rwkv_clip.training.plan import _check_resume, _check_vocabulary, _read_pretrained, _warn_of_changes
from rwkv_clip.training.run_folder import RunFolder

SMALL = {
    "image": {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "num_heads": 2, "hidden_rate": 2},
    "text": {"context_length": 12, "vocab_size": 100, "width": 16, "depth": 1, "num_heads": 2, "ffn_width": 32},
}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(SMALL))
    return load_config(path)


def test_a_vocabulary_smaller_than_the_tokenizer_s_is_refused(model):
    with pytest.raises(UserError, match="text.vocab_size is 100, .* set it to 49408"):
        _check_vocabulary(model)


def test_pretrained_weights_with_nan_are_refused_by_name(model, tmp_path):
    weights = published_state_dict(create_model(model))
    name = "text_model.emb.weight"
    weights[name] = torch.full_like(weights[name], float("nan"))
    save(tmp_path / "broken.pt", weights)
    with pytest.raises(UserError, match=f"'{name}' holds NaN or Inf"):
        _read_pretrained(str(tmp_path / "broken.pt"), model)


def test_a_job_that_was_refused_at_its_start_may_be_started_again_into_the_same_folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.check_free(None)
    run.create()  # the data are checked after it, and may be refused
    RunFolder(tmp_path / "run").check_free(None)
    (run.checkpoints / "step_00000001").mkdir()
    with pytest.raises(UserError, match="already holds a run"):
        run.check_free(None)


def test_a_second_job_with_the_same_output_is_refused_while_the_first_lives(tmp_path):
    script = "import sys; from rwkv_clip.training.run_folder import RunFolder; run = RunFolder(sys.argv[1])"
    first = subprocess.Popen(
        [sys.executable, "-c", f"{script}; run.create('auto'); print('ready', flush=True); sys.stdin.read()", tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout.readline() == "ready\n"
        with pytest.raises(UserError, match=f"another job .process {first.pid} on .* is writing to --output"):
            RunFolder(tmp_path).create("auto")
    finally:
        first.kill()
        first.wait()
    RunFolder(tmp_path).create("auto")  # a killed job leaves no lock behind


def test_an_output_path_that_no_disk_takes_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read --output"):
        RunFolder(tmp_path / ("x" * 300)).check_free(None)


@pytest.mark.parametrize(("saved", "then"), [({"loss": "clip"}, "clip"), ({}, "clip")])
def test_a_resumed_run_keeps_its_loss_also_where_the_run_is_older_than_the_flag(saved, then):
    plan = SimpleNamespace(description=lambda: {"flags": {"loss": "siglip"}}, resume_from="runs/old")
    with pytest.raises(UserError, match=f"--loss was {then} in the run to resume .* and is siglip"):
        _check_resume(plan, {"flags": saved})


def test_a_resumed_run_keeps_how_its_optimizer_s_state_is_divided():
    def described(size):
        common = dict.fromkeys(("flags", "model", "data"), {}) | {"global_batch": 8}
        return common | {"deepspeed": {"zero_optimization.sub_group_size": size}}

    plan = SimpleNamespace(description=lambda: described(20000), resume_from="runs/old")
    with pytest.raises(UserError, match="sub_group_size' in the DeepSpeed JSON was not set .* and is 20000: remove it"):
        _check_resume(plan, described(None))


@pytest.mark.parametrize(
    ("accumulation", "negatives", "world_size", "micro_batch", "words"),
    [
        ("micro", "global", 1, 4, "with 8 pairs, itself included, and from here on with 4"),
        ("micro", "global", 1, 8, None),
        ("micro", "local", 1, 8, "with 4 pairs, itself included, and from here on with 8"),
        ("global", "local", 1, 4, "with 8 pairs, itself included, and from here on with 16"),
        ("global", "global", 1, 4, None),
    ],
)
def test_a_resume_on_other_gpus_that_changes_the_negatives_says_so(
    caplog, monkeypatch, accumulation, negatives, world_size, micro_batch, words
):
    monkeypatch.setattr(logging.getLogger("rwkv_clip"), "propagate", True)
    common = {"epochs": 2, "global_batch": 16, "flags": {"accumulation": accumulation, "negatives": negatives}}
    then = {**common, "world_size": 2, "micro_batch": 4}
    _warn_of_changes({**common, "world_size": world_size, "micro_batch": micro_batch}, then)
    assert (words in caplog.text) if words else not caplog.text
    _warn_of_changes({**common, "world_size": 1, "micro_batch": 2}, {**common, "world_size": 2})  # an older save
