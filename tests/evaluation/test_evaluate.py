"""The whole evaluation: pictures and prepared folders in, scores out."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from evaluation_folder import COLOURS, TINY, make_model, write_table
from PIL import Image

from rwkv_clip import cli
from rwkv_clip.errors import UserError
from rwkv_clip.evaluation.evaluate import evaluate, evaluate_folder
from rwkv_clip.evaluation.features import Encoder
from rwkv_clip.evaluation.table import score_summary
from rwkv_clip.model.published import published_state_dict, save
from rwkv_clip.model.transform import MEAN, STD


class AnswerKey(torch.nn.Module):
    """In place of a model: features of a picture and of a text by the colour that it shows or names."""

    def __init__(self):
        super().__init__()
        self.config = TINY
        self.logit_scale = torch.nn.Parameter(torch.zeros(1))
        self.calls = {"images": 0, "texts": 0}

    def encode_image(self, images, normalize):
        self.calls["images"] += len(images)
        pixels = images.mean((2, 3)) * torch.tensor(STD) + torch.tensor(MEAN)
        colours = torch.tensor(list(COLOURS.values())) / 255
        return self._feature(torch.cdist(pixels, colours).argmin(1))

    def encode_text(self, tokens, normalize):
        self.calls["texts"] += len(tokens)
        from rwkv_clip.data.tokenizer import tokenize

        words = {int(tokenize(name)[0, 1]): i for i, name in enumerate(COLOURS)}
        return self._feature(torch.tensor([next(words[int(t)] for t in row if int(t) in words) for row in tokens]))

    def _feature(self, colour):
        return torch.nn.functional.one_hot(colour, TINY.image.width).float()


def test_a_model_that_knows_the_answers_gets_full_scores_and_sees_each_picture_once(folder):
    model = AnswerKey()
    result = evaluate(model, folder, batch_size=3, with_picture=True)
    assert result.problems == {}
    assert result.scores["zero_shot/walls/mean_per_class"] == result.scores["zero_shot/walls/accuracy"] == 1.0
    assert result.scores["zero_shot/walls/chance"] == 0.25
    for key in ("retrieval/walls", "retrieval/walls/caption", "retrieval/walls/caption2"):
        assert result.scores[f"{key}/R1"] == 1.0
        assert result.scores[f"{key}/text_to_image_R1_chance"] == 0.25
    assert result.sizes["retrieval/walls"] == (4, 8)
    assert result.sizes["retrieval/walls/caption2"] == (4, 4)
    # Prompts "a red wall" are captions as well; "a photo of a red wall." and "wall, red" are not.
    assert model.calls == {"images": 4, "texts": 12}
    assert result.picture.dtype == np.uint8 and result.picture.ndim == 3 and result.picture.shape[2] == 3


def test_the_summary_has_the_main_score_of_each_set_beside_chance(folder):
    scores = evaluate(AnswerKey(), folder).scores
    expected = "zero-shot walls 100.00 % (4.0 x chance)  R@5 walls 100.00 % (1.1 x chance)"
    assert score_summary({"validation/loss": 1.5} | scores) == expected


def test_the_picture_frames_the_right_answer_in_green(folder):
    picture = evaluate(AnswerKey(), folder, with_picture=True).picture
    frames = picture[2, 220::104]  # the upper frame of each picture of the first row
    assert (frames[0, 1] > frames[0, 0]).all()  # more green than red
    assert all(frame[0] > frame[1] for frame in frames[1:4])


def test_a_fresh_model_is_scored_in_eval_mode_and_left_as_it_was(folder):
    model = make_model().train()
    model.image_model.eval()  # as a frozen tower
    scores = evaluate_folder(model, folder)
    assert scores == evaluate_folder(make_model(), folder)
    assert all(0 <= value <= 1 for value in scores.values())
    assert model.training and not model.image_model.training and model.text_model.training


def test_E4_a_broken_set_stops_no_other(folder):
    (folder / "zs_broken.json").write_text("{")
    (folder / "zs_lost.json").write_text(json.dumps({"classes": ["red"]}))
    write_table(folder / "zs_lost.tsv", "image\tlabel", ["images/absent.png\t0", "images/red.png\t0"])
    result = evaluate(AnswerKey(), folder)
    assert result.scores["zero_shot/walls/accuracy"] == 1.0
    assert "zs_broken.json" in result.problems["zero_shot/broken"]
    assert "absent.png" in result.problems["zero_shot/lost"]
    assert not any("lost" in key or "broken" in key for key in result.scores)


WITHOUT = """
import sys
absent = ["nvidia", "deepspeed", "pyarrow", "mxnet", "torchvision", "tensorboard", "sklearn"]
sys.modules.update(dict.fromkeys(absent))
from rwkv_clip.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_E4_one_set_needs_none_of_the_packages_of_training_and_packing(folder, tmp_path):
    save(tmp_path / "weights.pt", published_state_dict(make_model()))
    (tmp_path / "model.json").write_text(json.dumps(TINY.to_dict()))
    (folder / "zs_broken.json").write_text("{")
    command = ["evaluate", str(tmp_path / "weights.pt"), "--model", str(tmp_path / "model.json"), "--data", str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *command, "--set", "walls", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "walls" in done.stdout and "25.00 %" in done.stdout


@pytest.fixture
def weights(tmp_path):
    """A weights file on its own, and its model's JSON file."""
    save(tmp_path / "weights.pt", published_state_dict(make_model()))
    (tmp_path / "tiny.json").write_text(json.dumps(TINY.to_dict()))
    return tmp_path / "weights.pt", tmp_path / "tiny.json"


def test_the_command_prints_chance_and_writes_what_evaluate_gives(folder, weights, tmp_path, capsys):
    out = tmp_path / "new" / "scores.json"
    picture = tmp_path / "new" / "picture.png"
    arguments = ["evaluate", str(weights[0]), "--model", str(weights[1]), "--data", str(folder), "--device", "cpu"]
    assert cli.main([*arguments, "--json", str(out), "--picture", str(picture)]) == 0
    written = json.loads(out.read_text())
    assert written["scores"] == pytest.approx(evaluate_folder(make_model(), folder))
    assert Image.open(picture).size[0] > 500
    table = capsys.readouterr().out
    assert "per class" in table and "R@5" in table and "25.00 %" in table
    assert table.count("walls/caption2") == 2


def test_a_run_and_a_checkpoint_in_it_bring_their_own_model(folder, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "model.json").write_text(json.dumps(TINY.to_dict()))
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    torch.save({"module": make_model().state_dict()}, checkpoint / "mp_rank_00_model_states.pt")
    for source in (tmp_path / "run", checkpoint):
        out = tmp_path / f"{source.name}.json"
        assert cli.main(["evaluate", str(source), "--data", str(folder), "--device", "cpu", "--json", str(out)]) == 0
        assert json.loads(out.read_text())["scores"] == pytest.approx(evaluate_folder(make_model(), folder))


def test_the_command_takes_bf16_weights(folder, weights):
    arguments = ["evaluate", str(weights[0]), "--model", str(weights[1]), "--data", str(folder), "--device", "cpu"]
    assert cli.main([*arguments, "--dtype", "bf16", "--limit", "2", "--set", "walls"]) == 0


def test_a_folder_of_broken_sets_gives_no_scores_and_a_warning(tmp_path, caplog):
    (tmp_path / "zs_broken.json").write_text("{")
    assert evaluate_folder(AnswerKey(), tmp_path, "cpu", batch_size=8) == {}
    assert "zero_shot/broken was not scored" in caplog.text


def test_a_set_without_scores_ends_the_command_with_an_error(folder, weights, capsys):
    (folder / "images" / "red.png").write_bytes(b"<html>")
    arguments = ["evaluate", str(weights[0]), "--model", str(weights[1]), "--data", str(folder), "--device", "cpu"]
    assert cli.main(arguments) == 2
    assert "error: zero_shot/walls was not scored: cannot read the picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--data", "/no/such"], "no folder"),
        (["--model", "RWKV-CLIP-Nona"], "RWKV-CLIP-Nano"),
        (["--device", "gpu"], "--device"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--batch-size", "0"], "--batch-size must be at least 1, found 0"),
    ],
)
def test_mistakes_are_one_clear_line(folder, weights, capsys, change, message):
    arguments = ["evaluate", str(weights[0]), "--model", str(weights[1]), "--data", str(folder), *change]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_weights_file_alone_needs_the_models_name(folder, weights, capsys):
    assert cli.main(["evaluate", str(weights[0]), "--data", str(folder)]) == 2
    assert "--model" in capsys.readouterr().err
    assert cli.main(["evaluate", "/no/such.pt", "--data", str(folder)]) == 2
    assert "/no/such.pt does not exist" in capsys.readouterr().err


def test_a_diverged_model_is_reported_and_gets_no_score(folder):
    model = make_model()
    torch.nn.init.constant_(model.image_model.ln1.weight, float("nan"))
    with pytest.raises(UserError, match="not finite"):
        evaluate(model, folder)


def test_D6_a_rotated_photo_is_seen_upright(model, fixtures):
    picture = Encoder(model)._read(fixtures / "img" / "exif_rot6.jpg")
    half = picture.shape[1] // 2
    pixels = (picture * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255
    quadrants = [pixels[:, :half, :half], pixels[:, :half, half:], pixels[:, half:, :half], pixels[:, half:, half:]]
    wanted = [COLOURS[name] for name in ("blue", "red", "yellow", "green")]
    for quadrant, colour in zip(quadrants, wanted, strict=True):
        inner = quadrant[:, 2:-2, 2:-2].mean((1, 2))
        assert (inner - torch.tensor(colour)).abs().max() < 20


def shared_scores(folder):
    """Scores of two ranks that share the work, of which only this rank's are returned."""
    import torch.distributed as dist

    from rwkv_clip.ops.wkv6_torch import wkv6_torch_backward, wkv6_torch_forward

    implementation = sys.modules["rwkv_clip.ops.implementation"]
    plain = implementation.Implementation("torch", wkv6_torch_forward, wkv6_torch_backward)
    sys.modules["rwkv_clip.ops.wkv6"].implementation = lambda device_type: plain
    result = evaluate(make_model(), folder, batch_size=1, group=dist.group.WORLD)
    return result.scores, result.problems


def test_ranks_that_share_the_work_get_the_scores_of_one(folder):
    sys.path.append(os.path.join(os.path.dirname(__file__), "..", "training"))
    from ranks import run_ranks

    (folder / "zs_lost.json").write_text(json.dumps({"classes": ["a"]}))
    write_table(folder / "zs_lost.tsv", "image\tlabel", ["images/absent.png\t0"])
    alone = evaluate(make_model(), folder)
    for scores, problems in run_ranks(2, shared_scores, folder):
        assert scores == pytest.approx(alone.scores)
        assert "absent.png" in problems["zero_shot/lost"]
