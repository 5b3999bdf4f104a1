"""Parameter groups and AdamW."""

from __future__ import annotations

import pytest
import torch

import rwkv_clip
from rwkv_clip.training.optimizer import (
    LRFactors,
    allocate_moments,
    build_optimizer,
    follow_schedule,
    learning_rates,
    parameter_groups,
    separate_steps,
)
from rwkv_clip.training.schedule import lr_lambda


@pytest.fixture
def model():
    return rwkv_clip.create_model("RWKV-CLIP-Nano")


def names_by_group(model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        group["name"]: [names[id(parameter)] for parameter in group["params"]]
        for group in parameter_groups(model, lr=1e-3, weight_decay=0.2)
    }


def test_O9_only_matrices_and_kernels_outside_the_mixing_parameters_decay(model):
    names = names_by_group(model)
    parameters = dict(model.named_parameters())
    assert sorted(names["decay"] + names["no_decay"]) == sorted(parameters)
    never = ("time_", "spatial_mix_", "logit_scale", "pos_embed", "cls_token", "bias", "ln")
    for name in names["decay"]:
        assert parameters[name].dim() >= 2, name
        assert not any(part in name for part in never), name
    undecayed = " ".join(names["no_decay"])
    for part in ("logit_scale", "pos_embed", "time_decay_w1", "time_maa_w2", "time_faaaa", "spatial_mix_k", "ln_x"):
        assert part in undecayed
    assert {name.split(".")[-2] for name in names["decay"]} == {
        *("receptance", "key", "value", "gate", "output"),
        *("projection", "emb"),
    }


def test_O9_the_groups_carry_the_decay_and_the_rate(model):
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.2)
    assert {group["name"]: (group["weight_decay"], group["lr"]) for group in groups} == {
        "decay": (0.2, 1e-3),
        "no_decay": (0.0, 1e-3),
    }


def test_in_each_group_parameters_of_whole_16_bytes_come_first_in_the_models_order(model):
    model.add_logit_bias()
    order = [name for name, _ in model.named_parameters()]
    for names in names_by_group(model).values():
        single = [name for name in names if name in ("logit_scale", "logit_bias")]
        assert names == sorted(set(names) - set(single), key=order.index) + single


def test_towers_and_decays_may_learn_at_their_own_rates_under_the_schedule(model):
    factors = LRFactors(image=0.1, decay=2.0)
    optimizer = build_optimizer(model, lr=1e-2, weight_decay=0.2, factors=factors)
    rate_of = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    names = dict(model.named_parameters())
    assert len(rate_of) == len(names)
    for name, rate, decay in (
        ("image_model.layers.0.att.key.weight", 1e-3, 0.2),
        ("image_model.layers.0.att.time_decay", 2e-3, 0.0),
        ("image_model.pos_embed", 1e-3, 0.0),
        ("text_model.blocks.1.att.key.weight", 1e-2, 0.2),
        ("text_model.blocks.1.att.time_decay", 2e-2, 0.0),
        ("text_model.blocks.1.att.time_decay_w1", 1e-2, 0.0),
        ("logit_scale", 1e-2, 0.0),
    ):
        assert rate_of[id(names[name])] == (pytest.approx(rate), decay), name
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda("linear", 3, 0))
    optimizer.step()
    scheduler.step()
    assert learning_rates(optimizer.param_groups) == pytest.approx(
        {
            "learning_rate": 5e-3,
            "learning_rate/image": 5e-4,
            "learning_rate/image_time_decay": 1e-3,
            "learning_rate/text": 5e-3,
            "learning_rate/text_time_decay": 1e-2,
        }
    )


def test_one_rate_for_all_is_one_curve(model):
    optimizer = build_optimizer(model, lr=1e-2)
    assert learning_rates(optimizer.param_groups) == {"learning_rate": 1e-2}


def test_frozen_parameters_are_in_no_group_and_no_group_is_empty(model):
    model.image_model.requires_grad_(False)
    names = names_by_group(model)
    assert names and not any(name.startswith("image_model.") for group in names.values() for name in group)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "logit_scale")
    assert names_by_group(model) == {"no_decay": ["logit_scale"]}


def test_O11_the_schedule_moves_the_rate_and_leaves_the_betas(model):
    optimizer = build_optimizer(model, lr=1e-3, weight_decay=0.2, betas=(0.95, 0.98), eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda("cosine", 6, 2))
    rates = []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(6):
        assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.95, 0.98), 1e-6)}
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert len(set(rates)) > 3


def test_one_step_decays_what_it_should_and_nothing_else(model):
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = set(names_by_group(model)["decay"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if name in decayed else 1.0))


@pytest.mark.parametrize(("saved_at", "epochs"), [(20, 4), (10, 4), (10, 2), (15, 1.6)])
def test_a_resume_with_other_epochs_takes_every_step_at_the_rate_of_its_own_schedule(model, saved_at, epochs):
    def start(steps: int):
        optimizer = build_optimizer(model, 1e-3, factors=LRFactors(image=0.5))
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda("cosine", steps, 0))

    optimizer, scheduler = start(20)
    for _ in range(saved_at):
        scheduler.step()
    saved = optimizer.state_dict(), scheduler.state_dict()
    whole, expected = start(int(10 * epochs))
    resumed, after = start(int(10 * epochs))
    for _ in range(saved_at):
        expected.step()
    resumed.load_state_dict(saved[0])
    after.load_state_dict(saved[1])
    follow_schedule(after)
    assert learning_rates(resumed.param_groups) == learning_rates(whole.param_groups)
    after.step(), expected.step()
    assert learning_rates(resumed.param_groups) == learning_rates(whole.param_groups)


def test_moments_made_ahead_change_no_weight_and_no_later_step():
    ends = []
    for ahead in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.3, fused=True)
        before = [parameter.clone() for parameter in layer.parameters()]
        if ahead:
            allocate_moments(optimizer)
            assert {name for state in optimizer.state.values() for name in state} == {"step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
            assert all(parameter.grad is None for parameter in layer.parameters())
        for step in range(3):
            layer(torch.full((2, 8), 0.5 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            allocate_moments(optimizer)  # there are some: nothing happens
        ends.append([parameter.detach().clone() for parameter in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("beside", [True, False])
def test_a_count_of_steps_shared_on_the_cpu_becomes_one_for_each_weight_where_the_optimizer_wants_it(beside):
    weights = [torch.nn.Parameter(torch.empty(4, device="meta")) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.1, capturable=beside)
    shared = torch.tensor(3.0)
    for weight in weights:
        optimizer.state[weight] = {"step": shared}
    separate_steps(optimizer)
    steps = [optimizer.state[weight]["step"] for weight in weights]
    assert len({id(step) for step in (shared, *steps)}) == 3
    assert [step.device.type for step in steps] == ["meta" if beside else "cpu"] * 2
