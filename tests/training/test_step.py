"""One optimizer step of real DeepSpeed engines: any number of ranks and micro batches, one result."""

from __future__ import annotations

import weakref
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from tiny import make_engine, make_model, make_pairs, micro_batches

from rwkv_clip.errors import UserError
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.optimizer import build_optimizer
from rwkv_clip.training.sigmoid_loss import SigmoidLoss
from rwkv_clip.training.step import RandomState, train_step

PAIRS, STEPS, LR = 48, 10, 1e-2
LOSSES = {"clip": ClipLoss, "siglip": SigmoidLoss}


def textbook_loss(image, text, scale, bias=None):
    logits = scale * image @ text.T
    if bias is not None:
        return -F.logsigmoid((2 * torch.eye(len(image)) - 1) * (logits + bias)).sum() / len(image)
    labels = torch.arange(len(image))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def textbook_step(model, optimizer, batches, whole: bool):
    """A step in plain PyTorch over micro batches: all pairs as negatives (whole), or the mean of each batch's loss."""
    features = [model(batch.images, batch.tokens) for batch in batches]
    if whole:
        features = [(torch.cat([f[0] for f in features]), torch.cat([f[1] for f in features]), *features[-1][2:])]
    loss = torch.stack([textbook_loss(*each) for each in features]).mean()
    optimizer.zero_grad()
    loss.backward()
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}
    optimizer.step()
    return loss.item(), gradients


@cache
def textbook_run(
    accumulation: int = 1, whole: bool = True, dropout: float = 0.0, steps: int = STEPS, loss: str = "clip"
):
    """Losses, the first step's gradients and the last weights of plain PyTorch in float32."""
    model = make_model(dropout=dropout, with_logit_bias=loss == "siglip")
    optimizer = build_optimizer(model, lr=LR, weight_decay=0.1)
    losses, first = [], None
    for step in range(steps):
        torch.manual_seed(step)
        batches = micro_batches(make_pairs(PAIRS, seed=step), 0, 1, accumulation)
        loss, gradients = textbook_step(model, optimizer, batches, whole)
        losses.append(loss)
        first = first or gradients
    return losses, first, {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def engine_run(
    accumulation: int,
    mode: str,
    stage: int,
    precision: str,
    dropout: float = 0.0,
    steps: int = STEPS,
    loss: str = "clip",
    chunk: int = 5,
):
    """The same through an engine on this rank's share of the pairs."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(dropout=dropout, with_logit_bias=loss == "siglip")
    engine = make_engine(model, PAIRS // world_size // accumulation, accumulation, stage, precision, lr=LR)
    loss_fn = LOSSES[loss](group=engine.data_parallel_group, chunk=chunk)
    losses, first = [], {}

    def recording_step(step=engine.step):
        if engine.is_gradient_accumulation_boundary() and not first:
            for name, parameter in model.named_parameters():
                first[name] = safe_get_full_grad(parameter).float().numpy().copy()
        step()

    engine.step = recording_step
    for step in range(steps):
        torch.manual_seed(step)
        batches = micro_batches(make_pairs(PAIRS, seed=step), rank, world_size, accumulation)
        result = train_step(engine, batches, loss_fn, mode)
        losses.append(result.loss.item())
        assert result.applied
        assert len(result.row_losses) == PAIRS // world_size
    assert engine.global_steps == steps
    return losses, first, {name: parameter.detach().float().numpy() for name, parameter in model.named_parameters()}


def engine_runs(settings):
    return [engine_run(*setting) for setting in settings]


def assert_same_run(run, wanted, setting=None, gradient_tolerance=1e-4, weight_tolerance=1e-5):
    (losses, gradients, weights), (wanted_losses, wanted_gradients, wanted_weights) = run, wanted
    assert losses == pytest.approx(wanted_losses, rel=1e-5), setting
    for name, wanted_gradient in wanted_gradients.items():
        error = np.linalg.norm(gradients[name] - wanted_gradient) / np.linalg.norm(wanted_gradient)
        assert error < gradient_tolerance, f"gradient of {name} with {setting}"
        np.testing.assert_allclose(
            weights[name], wanted_weights[name], atol=weight_tolerance, err_msg=f"{name} {setting}"
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_O1_any_number_of_ranks_and_micro_batches_trains_as_one_rank_with_the_whole_batch(world_size):
    # Accumulated micro batches, how their negatives are taken, ZeRO stage, ..., loss, rows of logits at once.
    settings = [
        (1, "global", 1, "fp32", 0.0, STEPS, "clip", 0),
        (4, "global", 1, "fp32", 0.0, STEPS, "clip", 5),
        (2, "global", 2, "fp32", 0.0, STEPS, "clip", 5),
        (1, "global", 1, "fp32", 0.0, STEPS, "siglip", 0),
        (4, "global", 1, "fp32", 0.0, STEPS, "siglip", 5),
    ]
    runs = zip(*run_ranks(world_size, engine_runs, settings), strict=True)
    for setting, by_rank in zip(settings, runs, strict=True):
        for run in by_rank:
            assert_same_run(run, textbook_run(loss=setting[6]), setting)


def test_O5_plain_accumulation_takes_the_mean_of_its_micro_gradients():
    # 8 micro steps of 4 accumulated ones are 2 updates.
    wanted = textbook_run(accumulation=4, whole=False, steps=2)
    (run,) = run_ranks(1, engine_run, 4, "micro", 1, "fp32", 0.0, 2)
    assert_same_run(run, wanted)
    assert abs(wanted[0][0] - textbook_run(steps=2)[0][0]) > 0.1  # another loss than the whole batch's


def test_the_replayed_pass_draws_the_same_dropout():
    wanted = textbook_run(accumulation=3, dropout=0.3, steps=3)
    (run,) = run_ranks(1, engine_run, 3, "global", 1, "fp32", 0.3, 3)
    assert_same_run(run, wanted)


def test_bf16_engines_agree_at_any_split_as_far_as_bf16_goes():
    settings = [(1, "global", 1, "bf16"), (2, "global", 1, "bf16"), (2, "global", 2, "bf16")]
    for world_size in (1, 2):
        for run in run_ranks(world_size, engine_runs, settings)[0]:
            assert run[0][:3] == pytest.approx(textbook_run()[0][:3], rel=0.02)
            for name, wanted in textbook_run()[1].items():
                error = np.linalg.norm(run[1][name] - wanted) / np.linalg.norm(wanted)
                assert error < 0.05, name


def schedule_run(accumulation: int, mode: str):
    """Rates used by the 8 updates of 64 records, 2 ranks, 8 pairs a rank and step, 2 epochs, and the rate after."""
    import torch.distributed as dist

    from rwkv_clip.training.schedule import lr_lambda

    steps_per_epoch = 64 // (8 * dist.get_world_size())
    factor = lr_lambda("cosine", total_steps=2 * steps_per_epoch, warmup_steps=2, minimum=0.1)
    engine = make_engine(make_model(), 8 // accumulation, accumulation, lr=1.0, schedule=factor)
    rates = []
    for step in range(2 * steps_per_epoch):
        rates.append(engine.get_lr()[0])
        batches = micro_batches(make_pairs(16, seed=step), dist.get_rank(), 2, accumulation)
        train_step(engine, batches, ClipLoss(group=engine.data_parallel_group), mode)
    return rates, engine.get_lr(), engine.global_steps


def schedule_runs(settings):
    return [schedule_run(*setting) for setting in settings]


def test_O7_eight_updates_end_at_the_minimum_rate_with_any_accumulation():
    for runs in run_ranks(2, schedule_runs, [(1, "global"), (4, "global"), (2, "micro")]):
        for rates, after, updates in runs:
            assert updates == 8
            assert rates[:2] == pytest.approx([0.5, 1.0])
            assert rates[-1] == pytest.approx(0.1)
            assert after == pytest.approx([0.1, 0.1])


def order_run(accumulation: int, mode: str) -> list[str]:
    engine = make_engine(make_model(), 4, accumulation)
    calls = []

    def note(name: str) -> None:
        method = getattr(engine, name)
        setattr(engine, name, lambda *args, **options: calls.append(name) or method(*args, **options))

    for name in ("forward", "backward", "step"):
        note(name)
    losses = []

    def loss_fn(*features):
        output = ClipLoss()(*features)
        losses.append(weakref.ref(output.loss))
        return output

    def meanwhile() -> None:
        assert all(loss() is None for loss in losses)  # to drop their graphs takes time as well
        calls.append("meanwhile")

    batches = micro_batches(make_pairs(4 * accumulation), 0, 1, accumulation)
    train_step(engine, batches, loss_fn, mode, meanwhile)
    return calls


def order_runs(settings):
    return [order_run(*setting) for setting in settings]


def test_there_is_time_for_other_things_between_the_last_pass_and_the_engines_step():
    one, plain, whole = run_ranks(1, order_runs, [(1, "global"), (2, "micro"), (2, "global")])[0]
    assert one == ["forward", "backward", "meanwhile", "step"]
    assert plain == ["forward", "backward", "step", "forward", "backward", "meanwhile", "step"]
    assert whole == ["forward", "forward", *plain]


def test_random_state_of_the_cpu_comes_back():
    state = RandomState.capture(torch.device("cpu"))
    drawn = torch.rand(5)
    torch.rand(7)
    state.restore()
    assert torch.equal(torch.rand(5), drawn)


class EngineOfTwo:
    def gradient_accumulation_steps(self):
        return 2


def test_wrong_arguments_are_named():
    with pytest.raises(UserError, match="'mean'"):
        train_step(EngineOfTwo(), [], ClipLoss(), "mean")
    with pytest.raises(ValueError, match="accumulates 2 micro batches, got 3"):
        train_step(EngineOfTwo(), [None] * 3, ClipLoss())
