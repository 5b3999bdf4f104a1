"""The check of a model against the published model's outputs in `tests/fixtures/golden` (see its README)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.config import ImageConfig, ModelConfig, TextConfig

FORWARD_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = {"float32": 1e-3, "bfloat16": 4e-3}


def golden_config(cfg: dict) -> ModelConfig:
    """The model of one golden configuration."""
    width = cfg["dim"]
    return ModelConfig(
        name=cfg["name"],
        image=ImageConfig(cfg["img"], cfg["patch"], width, cfg["depth"], cfg["heads"], cfg["hrate"]),
        text=TextConfig(
            cfg["ctx"], cfg["vocab"], width, cfg["tlayers"], width // cfg["ths"], int(width * 3.5) // 32 * 32
        ),
        initialize_text=False,  # every weight is loaded
    )


def golden_state(folder: Path, name: str) -> dict[str, Tensor]:
    """The published state dict whose outputs were recorded."""
    fill = _weights_module(folder).fill
    state = {}
    for key, (shape, dtype) in json.loads((folder / f"{name}_keys.json").read_text()).items():
        state[key] = torch.as_tensor(fill(key, tuple(shape))).to(getattr(torch, dtype))
    return state


def golden_inputs(folder: Path, cfg: dict) -> tuple[Tensor, Tensor]:
    """Images and tokens of the recorded batch."""
    images, tokens = _weights_module(folder).inputs(cfg)
    return torch.from_numpy(images), torch.from_numpy(tokens)


def contrastive_loss(image_features: Tensor, text_features: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss of normalised features in one process, the plainest form."""
    logits = scale * image_features @ text_features.T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def check_golden(folder: Path, name: str, device: str) -> None:
    """Assert that forward pass, loss and gradients equal the recorded ones, in float32 on `device`."""
    expected = json.loads((folder / f"{name}.json").read_text())
    tensors = load_file(folder / f"{name}.safetensors", device=device)
    state = golden_state(folder, name)
    model = RWKVCLIP(golden_config(expected["cfg"]))
    model.load_state_dict(state, strict=True)
    model.to(device)
    images, tokens = (tensor.to(device) for tensor in golden_inputs(folder, expected["cfg"]))

    image_embedding, text_embedding = model.encode_image(images), model.encode_text(tokens)
    assert _largest_difference(image_embedding, tensors["image_embedding"]) < FORWARD_TOLERANCE
    assert _largest_difference(text_embedding, tensors["text_embedding"]) < FORWARD_TOLERANCE
    scale = model.logit_scale.exp()
    loss = contrastive_loss(F.normalize(image_embedding, dim=-1), F.normalize(text_embedding, dim=-1), scale)
    assert abs(scale.item() - expected["logit_scale"]) < FORWARD_TOLERANCE
    assert abs(loss.item() - expected["loss"]) < FORWARD_TOLERANCE

    loss.backward()
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(expected["grad_norm"])
    wrong = []
    for key, [norm] in expected["grad_norm"].items():
        found = parameters[key].grad.norm().item()
        dtype = str(state[key].dtype).removeprefix("torch.")
        if abs(found - norm) > GRADIENT_TOLERANCE[dtype] * norm:
            wrong.append(f"{key}: norm {found}, recorded {norm}")
    assert not wrong, "\n".join(wrong)
    for tensor, key, dtype in (
        ("grad_image_pos_embed", "image_model.pos_embed", "float32"),
        ("grad_image_u1", "image_model.layers.1.att.time_faaaa", "float32"),
        ("grad_text_time_decay0", "text_model.blocks.0.att.time_decay", "bfloat16"),
    ):
        difference = _largest_difference(parameters[key].grad, tensors[tensor])
        assert difference < GRADIENT_TOLERANCE[dtype] * tensors[tensor].abs().max().item(), key


def check_golden_in_bfloat16(folder: Path, name: str, device: str) -> None:
    """Assert that bf16 weights give features of cosine 0.999 with the recorded ones, and the loss within 1 %."""
    expected = json.loads((folder / f"{name}.json").read_text())
    tensors = load_file(folder / f"{name}.safetensors", device=device)
    model = RWKVCLIP(golden_config(expected["cfg"]))
    model.load_state_dict(golden_state(folder, name))
    model.to(device, torch.bfloat16)
    images, tokens = (tensor.to(device) for tensor in golden_inputs(folder, expected["cfg"]))
    with torch.no_grad():
        image_features, text_features, scale = model(images, tokens)
    for features, tensor in ((image_features, "image_embedding"), (text_features, "text_embedding")):
        assert F.cosine_similarity(features, tensors[tensor]).min() > 0.999, tensor
    loss = contrastive_loss(image_features, text_features, scale).item()
    assert abs(loss - expected["loss"]) < 0.01 * expected["loss"]


def _largest_difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return (found.float() - expected.float()).abs().max().item()


def _weights_module(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_weights", folder / "weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
