"""What the towers do beyond the golden outputs: other sizes, the class token, dropout, wrong input, low precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from golden import contrastive_loss
from small_models import small_batch, small_config, small_model

from rwkv_clip import ops
from rwkv_clip.errors import UserError
from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.image_tower import PatchProjection, add_branch
from rwkv_clip.model.mixing import SquaredReLU


def test_forward_gives_unit_features_and_a_scalar_temperature() -> None:
    model = small_model()
    images, tokens = small_batch(model)
    image_features, text_features, scale = model(images, tokens)
    torch.testing.assert_close(image_features, F.normalize(model.encode_image(images), dim=-1))
    torch.testing.assert_close(text_features, model.encode_text(tokens, normalize=True))
    assert image_features.shape == text_features.shape == (3, 32) and scale.shape == ()
    torch.testing.assert_close(scale, torch.tensor(1 / 0.07))
    assert not torch.allclose(model.encode_image(images).norm(dim=-1), torch.ones(3))


def test_the_text_feature_is_the_mean_of_unit_tokens_padding_included() -> None:
    model = small_model()
    outputs = []
    model.text_model.ln_out.register_forward_hook(lambda module, args, output: outputs.append(output))
    tokens = small_batch(model)[1]
    tokens[:, 5:] = 0
    expected = F.normalize(model.encode_text(tokens), dim=-1), F.normalize(outputs[0], dim=-1).mean(dim=1)
    torch.testing.assert_close(expected[0], F.normalize(expected[1], dim=-1))
    torch.testing.assert_close(model.encode_text(tokens), expected[1])


@pytest.mark.parametrize("length", [1, 2, 11, 12])
def test_shorter_texts_than_the_context_are_encoded_at_their_own_length(length: int) -> None:
    model = small_model()
    tokens = small_batch(model)[1]
    features = model.encode_text(tokens[:, :length])
    assert features.shape == (3, 32) and features.isfinite().all()
    if length < 12:
        assert not torch.allclose(features, model.encode_text(tokens))


def test_patches_are_projected_as_a_convolution_does() -> None:
    projection = PatchProjection(3, 5, kernel_size=4, stride=4)
    images = torch.randn(2, 3, 8, 12)
    expected = F.conv2d(images, projection.weight, projection.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(projection(images), expected)
    torch.testing.assert_close(projection(images.to(memory_format=torch.channels_last)), expected)


@pytest.mark.parametrize("output", [False, True])
def test_the_class_token_is_appended_last_and_is_the_feature_when_it_is_the_output(output: bool) -> None:
    model = small_model(image=dict(with_cls_token=True, output_cls_token=output))
    inputs, outputs = [], []
    model.image_model.layers[0].ln0.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model.image_model.ln1.register_forward_hook(lambda module, args, result: outputs.append(result))
    features = model.encode_image(small_batch(model)[0])
    assert inputs[0].shape == outputs[0].shape == (3, 17, 32)
    assert torch.equal(inputs[0][:, -1], model.image_model.cls_token[0].expand(3, -1))
    expected = outputs[0][:, -1] if output else outputs[0][:, :-1].mean(dim=1)
    torch.testing.assert_close(features, expected)
    features.sum().backward()
    assert model.image_model.cls_token.grad.abs().sum() > 0


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 24), (16, 16)])
def test_another_image_size_gets_position_embeddings_resized_by_bicubic_interpolation(height: int, width: int) -> None:
    model = small_model()
    tower, (rows, columns) = model.image_model, (height // 4, width // 4)
    found = tower.position_embedding((rows, columns))
    grid = tower.pos_embed.reshape(1, 4, 4, 32).permute(0, 3, 1, 2)
    expected = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
    torch.testing.assert_close(found.reshape(rows, columns, 32), expected[0].permute(1, 2, 0))
    assert model.encode_image(torch.randn(2, 3, height, width)).shape == (2, 32)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 18, 16), "image size 18x16 does not fit patches of 4x4 pixels; resize to multiples of 4"),
        (
            torch.zeros(2, 1, 16, 16),
            r"images must be floating point \[B, 3, height, width\], found .* \[2, 1, 16",
        ),
        (torch.zeros(3, 16, 16), r"found torch.float32 \[3, 16, 16\]"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "found torch.uint8"),
    ],
)
def test_images_that_do_not_fit_are_refused_in_one_line(images: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        small_model().encode_image(images)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "tokens", [torch.zeros(2, 13, dtype=torch.int64), torch.zeros(2, 12), torch.zeros(12, dtype=torch.int64)]
)
def test_tokens_that_do_not_fit_are_refused_in_one_line(tokens: torch.Tensor) -> None:
    with pytest.raises(UserError, match="tokens must be whole numbers .* from 1 to 12") as error:
        small_model().encode_text(tokens)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_K14_low_precision_weights_train_without_dtype_errors_and_give_float32_features(dtype: torch.dtype) -> None:
    reference, model = small_model(), small_model().to(dtype)
    images, tokens = small_batch(model)
    outputs = model(images, tokens)
    assert [output.dtype for output in outputs] == [torch.float32] * 3
    for found, expected in zip(outputs[:2], reference(images, tokens)[:2], strict=True):
        assert F.cosine_similarity(found, expected).min() > 0.999
    contrastive_loss(*outputs).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == dtype and parameter.grad.isfinite().all(), name


def test_autocast_with_float32_weights_runs_and_stays_close() -> None:
    model = small_model()
    images, tokens = small_batch(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(images, tokens)
    contrastive_loss(*outputs).backward()
    for found, expected in zip(outputs[:2], model(images, tokens)[:2], strict=True):
        assert found.dtype == torch.float32
        assert F.cosine_similarity(found, expected).min() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decay_and_bonus_reach_the_operator_in_float32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    seen = []
    original = ops.wkv6

    def record(r, k, v, w, u):
        seen.append((r.dtype, k.dtype, v.dtype, w.dtype, u.dtype))
        return original(r, k, v, w, u)

    monkeypatch.setattr(ops, "wkv6", record)
    model = small_model().to(dtype)
    model(*small_batch(model))
    assert seen == [(dtype, dtype, dtype, torch.float32, torch.float32)] * 4


def test_drop_path_drops_whole_samples_in_training_alone_and_keeps_the_mean() -> None:
    tower = small_model(image=dict(drop_path_rate=0.5)).image_model
    x, branch = torch.zeros(4000, 2, 3), torch.ones(4000, 2, 3)
    first, last = tower.branch_scales(x)
    assert torch.equal(first, torch.ones(2, 4000, 1, 1))
    assert not torch.equal(last[0], last[1])
    dropped = add_branch(x, branch, last[0])
    per_sample = dropped[:, 0, 0]
    assert torch.equal(dropped, per_sample[:, None, None].expand_as(dropped))
    assert set(per_sample.tolist()) == {0.0, 2.0}
    assert per_sample.mean().item() == pytest.approx(1.0, abs=0.05)
    assert tower.eval().branch_scales(x) == [None, None]
    assert torch.equal(add_branch(x, branch, None), branch)


def test_drop_path_acts_on_both_branches_of_a_block() -> None:
    block = small_model(image=dict(drop_path_rate=0.5)).image_model.layers[1]
    x = torch.randn(3, 16, 32)
    scales = torch.zeros(2, 3, 1, 1)
    assert torch.equal(block(x, (4, 4), scales), x)
    for branch in (0, 1):
        scales = torch.zeros(2, 3, 1, 1)
        scales[branch, 1] = 1.0
        changed = (block(x, (4, 4), scales) != x).flatten(1).any(dim=1)
        assert changed.tolist() == [False, True, False]


def test_drop_path_rates_rise_linearly_over_the_depth() -> None:
    tower = RWKVCLIP(small_config(image=dict(depth=4, drop_path_rate=0.3))).image_model
    scales = torch.stack(tower.branch_scales(torch.zeros(8000, 1, 1)))
    assert scales.eq(0).float().mean(dim=(1, 2, 3, 4)).tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=0.01)


def test_text_dropout_acts_in_training_alone() -> None:
    model = small_model(text=dict(dropout=0.5))
    tokens = small_batch(model)[1]
    assert not torch.allclose(model.encode_text(tokens), model.encode_text(tokens))
    model.eval()
    assert torch.equal(model.encode_text(tokens), model.encode_text(tokens))
    torch.testing.assert_close(model.encode_text(tokens), small_model().encode_text(tokens))


def test_M1_a_model_of_one_layer_trains_a_step_with_finite_values() -> None:
    torch.manual_seed(0)
    model = RWKVCLIP(small_config(image=dict(depth=1, drop_path_rate=0.3), text=dict(depth=1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, tokens = small_batch(model)
    before = contrastive_loss(*model(images, tokens))
    before.backward()
    optimizer.step()
    after = contrastive_loss(*model(images, tokens))
    assert before.isfinite() and after.isfinite()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_frozen_towers_still_forward_and_train_the_other() -> None:
    model = small_model()
    model.image_model.requires_grad_(False)
    contrastive_loss(*model(*small_batch(model))).backward()
    assert all(parameter.grad is None for parameter in model.image_model.parameters())
    assert all(parameter.grad is not None for parameter in model.text_model.parameters())


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_the_squared_relus_gradient_is_that_of_its_formula(device: str, dtype: torch.dtype, share: float) -> None:
    x = torch.randn(40, 30, device=device).to(dtype).requires_grad_()
    direction = torch.randn(40, 30, device=device).to(dtype)
    y = SquaredReLU.apply(x)
    (gradient,) = torch.autograd.grad(y, x, direction)
    exact = x.detach().double()
    torch.testing.assert_close(y.double(), exact.relu().square(), rtol=share, atol=0)
    torch.testing.assert_close(gradient.double(), 2 * exact.relu() * direction.double(), rtol=2 * share, atol=0)
