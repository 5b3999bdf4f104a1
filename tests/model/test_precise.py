"""Parameters that act with float32 values in a bf16 model."""

from __future__ import annotations

import torch
from golden import contrastive_loss
from small_models import small_batch, small_model

from rwkv_clip.model.precise import precise_value


def test_the_temperature_and_every_decay_and_bonus_are_precise() -> None:
    model = small_model()
    expected = {"logit_scale"}
    for block in ("image_model.layers.0", "image_model.layers.1", "text_model.blocks.0", "text_model.blocks.1"):
        expected |= {f"{block}.att.time_decay", f"{block}.att.time_faaaa"}
    precise = model.precise_parameters()
    assert set(precise) == expected
    for name, (parameter, buffer) in precise.items():
        assert parameter is model.get_parameter(name)
        assert buffer.dtype == torch.float32 and buffer.shape == parameter.shape and not buffer.requires_grad


def test_the_buffers_are_not_in_the_state_dict() -> None:
    assert set(small_model().state_dict()) == {name for name, _ in small_model().named_parameters()}


def test_a_float32_parameter_is_its_own_precise_value() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    assert precise_value(parameter, torch.tensor([2.0])) is parameter


def test_a_rounded_parameter_takes_the_buffers_value_and_gets_the_gradient() -> None:
    parameter = torch.nn.Parameter(torch.tensor([4.613], dtype=torch.bfloat16))
    buffer = torch.tensor([4.6051])
    value = precise_value(parameter, buffer)
    assert value.dtype == torch.float32 and torch.equal(value, buffer)
    (3 * value).sum().backward()
    assert parameter.grad.dtype == torch.bfloat16 and parameter.grad.item() == 3.0


def test_a_cast_keeps_the_exact_values_in_the_buffers_and_a_cast_back_restores_them() -> None:
    model = small_model()
    exact = {name: parameter.detach().clone() for name, (parameter, _) in model.precise_parameters().items()}
    for cast in (lambda: model.to(torch.bfloat16), lambda: model.half(), lambda: model.to("cpu")):
        cast()
        for name, (parameter, buffer) in model.precise_parameters().items():
            assert parameter.dtype != torch.float32
            assert torch.equal(buffer, exact[name]), name
    model.float()
    for name, (parameter, _) in model.precise_parameters().items():
        assert torch.equal(parameter, exact[name]), name


def test_a_cast_from_float32_takes_trained_values_not_stale_ones() -> None:
    model = small_model()
    with torch.no_grad():
        model.logit_scale.add_(0.0123)
    exact = model.logit_scale.detach().clone()
    assert torch.equal(model.bfloat16().logit_scale_fp32, exact)


def test_the_forward_pass_of_a_bf16_model_uses_the_buffers() -> None:
    model = small_model().to(torch.bfloat16)
    images, tokens = small_batch(model)
    image, text, scale = model(images, tokens)
    assert torch.equal(scale, model.logit_scale_fp32.exp()[0])
    with torch.no_grad():
        for name, (_, buffer) in model.precise_parameters().items():
            buffer.add_(1.0 if "decay" in name or "faaaa" in name else 0.01)
    changed_image, changed_text, changed_scale = model(images, tokens)
    assert (image - changed_image).abs().max() > 1e-3
    assert (text - changed_text).abs().max() > 1e-3
    assert changed_scale > scale


def test_bf16_rounding_of_the_decay_does_not_reach_the_features() -> None:
    """With only the precise parameters in bf16 the features are those of float32, bit for bit."""
    model = small_model()
    images, tokens = small_batch(model)
    expected = model(images, tokens)
    for parameter, buffer in model.precise_parameters().values():
        buffer.copy_(parameter.detach())
        parameter.data = parameter.data.bfloat16()
    for found, wanted in zip(model(images, tokens), expected, strict=True):
        assert torch.equal(found, wanted)
    contrastive_loss(*model(images, tokens)).backward()
    assert all(p.grad.dtype == torch.bfloat16 for p, _ in model.precise_parameters().values())


def test_loading_a_state_dict_fills_parameters_and_buffers_in_either_shape_of_the_temperature() -> None:
    source, model = small_model(seed=1), small_model(seed=2).to(torch.bfloat16)
    state = source.state_dict()
    state["logit_scale"] = torch.tensor(3.3333)
    model.load_state_dict(state)
    assert torch.equal(model.logit_scale_fp32, torch.tensor([3.3333]))
    for name, (parameter, buffer) in model.precise_parameters().items():
        assert torch.equal(buffer, state[name].reshape(buffer.shape)), name
        assert torch.equal(parameter, buffer.bfloat16()), name
    assert state["logit_scale"].shape == ()
