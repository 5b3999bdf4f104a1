"""Published weights: loading them, what they give, and writing files that the published code loads."""

from __future__ import annotations

import os
import resource
import stat
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import contrastive_loss
from small_models import small_config, small_model

import rwkv_clip
from rwkv_clip.cli import main
from rwkv_clip.errors import UserError
from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.published import load_into, published_state_dict, read_state_dict, save

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.fixture
def tiny(fixtures: Path) -> Path:
    """The folder of the tiny published checkpoint."""
    return fixtures / "ckpt"


def assert_published_embeddings(model: RWKVCLIP, tiny: Path, device: str = "cpu") -> None:
    expected = {key: torch.from_numpy(value) for key, value in np.load(tiny / "tiny_expected.npz").items()}
    images, tokens = expected["image"].to(device), expected["tokens"].to(device)
    with torch.no_grad():
        image, text = model.encode_image(images), model.encode_text(tokens)
        loss = contrastive_loss(*model(images, tokens))
    assert (image.cpu() - expected["image_embedding"]).abs().max() < 1e-4
    assert (text.cpu() - expected["text_embedding"]).abs().max() < 1e-4
    assert abs(loss.item() - 2.0973) < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_M3_published_weights_give_the_published_embeddings_and_loss(tiny: Path, device: str) -> None:
    model = rwkv_clip.create_model(tiny / "tiny_config.json", device=device, checkpoint=tiny / "tiny_ref.pt")
    assert not model.training
    assert_published_embeddings(model, tiny, device)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_C10_prefixes_of_wrappers_come_off(tiny: Path, tmp_path: Path, prefix: str) -> None:
    state = torch.load(tiny / "tiny_ref.pt", weights_only=True)
    torch.save({prefix + name: value for name, value in state.items()}, tmp_path / "wrapped.pt")
    model = rwkv_clip.create_model(tiny / "tiny_config.json", checkpoint=tmp_path / "wrapped.pt")
    assert_published_embeddings(model, tiny)


def test_C10_marks_of_compiled_blocks_inside_a_name_come_off(tmp_path: Path) -> None:
    torch.save({"module.image_model.layers.0._orig_mod.ln1.bias": torch.zeros(2)}, tmp_path / "blocks.pt")
    assert list(read_state_dict(tmp_path / "blocks.pt")) == ["image_model.layers.0.ln1.bias"]


def test_C12_loading_and_exporting_give_no_warning(tiny: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = rwkv_clip.create_model(tiny / "tiny_config.json", checkpoint=tiny / "tiny_ref.pt")
        save(tmp_path / "export.pt", published_state_dict(model))
        read_state_dict(tmp_path / "export.pt")


def test_C13_bfloat16_tensors_in_the_file_load_exactly_into_float32(tiny: Path) -> None:
    state = read_state_dict(tiny / "tiny_ref.pt")
    stored = {name for name, value in state.items() if value.dtype == torch.bfloat16}
    assert len(stored) == 4
    model = rwkv_clip.create_model(tiny / "tiny_config.json", checkpoint=tiny / "tiny_ref.pt")
    for name in stored:
        assert model.state_dict()[name].dtype == torch.float32
        assert torch.equal(model.state_dict()[name], state[name].float())


def test_C13_a_file_saved_from_another_gpu_loads_on_the_cpu(tiny: Path, tmp_path: Path) -> None:
    state = torch.load(tiny / "tiny_ref.pt", weights_only=True)
    torch.save(state, tmp_path / "cpu.pt")
    write_storage_device(tmp_path / "cpu.pt", tmp_path / "gpu.pt", "cuda:3")
    if torch.cuda.device_count() < 4:
        with pytest.raises(RuntimeError, match="CUDA device"):
            torch.load(tmp_path / "gpu.pt", weights_only=True)
    loaded = read_state_dict(tmp_path / "gpu.pt")
    assert all(value.device.type == "cpu" and torch.equal(value, state[name]) for name, value in loaded.items())


def write_storage_device(source: Path, target: Path, device: str) -> None:
    """Copy a torch file so that its tensors claim to come from `device`: a pickled string, its length before it."""
    old, new = (b"X" + len(name).to_bytes(4, "little") + name.encode() for name in ("cpu", device))
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as written:
        for item in read.infolist():
            data = read.read(item)
            written.writestr(item.filename, data.replace(old, new) if item.filename.endswith("data.pkl") else data)


def expected_keys(tiny: Path) -> dict[str, tuple[int, ...]]:
    lines = (line.split("\t") for line in (tiny / "tiny_ref_keys.txt").read_text().splitlines())
    return {name: tuple(int(size) for size in shape.strip("()").split(",") if size.strip()) for name, shape, _ in lines}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_C14_an_export_has_the_published_keys_and_shapes_in_float32(tiny: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"export{suffix}"
    assert main(["export", str(tiny / "tiny_ref.pt"), str(out)]) == 0
    state = read_state_dict(out)
    assert {name: tuple(value.shape) for name, value in state.items()} == expected_keys(tiny)
    assert len(state) == 125 and state["logit_scale"].shape == ()
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_C14_an_export_of_a_loaded_model_gives_every_value_back_bit_equal(
    tiny: Path, tmp_path: Path, suffix: str
) -> None:
    model = rwkv_clip.create_model(tiny / "tiny_config.json", checkpoint=tiny / "tiny_ref.pt")
    save(tmp_path / f"export{suffix}", published_state_dict(model))
    exported, original = read_state_dict(tmp_path / f"export{suffix}"), read_state_dict(tiny / "tiny_ref.pt")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name].float()) for name in original)


def test_a_bfloat16_model_exports_its_precise_parameters_exactly() -> None:
    model = small_model()
    exact = published_state_dict(model)
    rounded = published_state_dict(model.to(torch.bfloat16))
    precise = set(model.precise_parameters())
    assert len(precise) == 1 + 2 * 4
    for name in exact:
        assert torch.equal(rounded[name], exact[name] if name in precise else exact[name].bfloat16().float()), name


def test_weights_load_into_a_bfloat16_model_with_exact_decays(tmp_path: Path) -> None:
    source = small_model(seed=3)
    save(tmp_path / "weights.pt", published_state_dict(source))
    model = small_model(seed=4).to(torch.bfloat16)
    load_into(model, tmp_path / "weights.pt")
    for name, (parameter, buffer) in model.precise_parameters().items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(buffer, source.get_parameter(name)), name


def test_a_model_created_with_weights_holds_nothing_else(tmp_path: Path) -> None:
    source = small_model(image=dict(with_cls_token=True))
    save(tmp_path / "weights.pt", published_state_dict(source))
    for dtype in (torch.float32, torch.bfloat16):
        model = rwkv_clip.create_model(source.config, dtype=dtype, checkpoint=tmp_path / "weights.pt")
        assert all(torch.equal(model.get_parameter(name), p.to(dtype)) for name, p in source.named_parameters())
        assert all(torch.equal(b, source.get_parameter(name)) for name, (_, b) in model.precise_parameters().items())


def test_weights_of_another_model_are_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    wanted = RWKVCLIP(small_config(image=dict(depth=3)))
    with pytest.raises(UserError, match="missing, first 'image_model.layers.2") as error:
        save(tmp_path / "small.pt", published_state_dict(small_model()))
        load_into(wanted, tmp_path / "small.pt")
    assert "\n" not in str(error.value) and "small.pt" in str(error.value)
    with pytest.raises(UserError, match=r"'text_model.emb.weight' has shape \[49408, 32\], the model \[64, 32\]"):
        load_into(RWKVCLIP(small_config(text=dict(num_heads=4))), tiny / "tiny_ref.pt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.pt", None, "do not exist"),
        ("damaged.pt", b"not a pickle", "damaged, or more than tensors in it"),
        ("empty.pt", b"", "damaged, or more than tensors in it"),
        ("damaged.safetensors", b"\xff" * 16, "not a readable safetensors file"),
    ],
)
def test_a_file_without_weights_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_state_dict(tmp_path / name)
    assert "\n" not in str(error.value) and name in str(error.value)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"model": Path("x")}, tmp_path / "code.pt")
    with pytest.raises(UserError, match="more than tensors"):
        read_state_dict(tmp_path / "code.pt")


def test_a_folder_without_a_checkpoint_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint in this folder"):
        read_state_dict(tmp_path)
    for name in ("step_00000009", "step_00000010", "step_00000011.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "mp_rank_00_model_states.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="step_00000010: incomplete or damaged checkpoint"):
        read_state_dict(tmp_path)


def test_a_finished_runs_weights_are_taken_unless_a_checkpoint_is_newer(tmp_path: Path) -> None:
    save(tmp_path / "weights.pt", {"a": torch.ones(2)})
    checkpoint = tmp_path / "checkpoints" / "step_00000010"
    checkpoint.mkdir(parents=True)
    torch.save({"module": {"a": torch.zeros(2)}}, checkpoint / "mp_rank_00_model_states.pt")
    os.utime(checkpoint, (1, 1))
    assert torch.equal(read_state_dict(tmp_path)["a"], torch.ones(2))
    os.utime(tmp_path / "weights.pt", (0, 0))
    assert torch.equal(read_state_dict(tmp_path)["a"], torch.zeros(2))


def test_a_locked_towers_float32_weights_replace_the_rounded_copies(tmp_path: Path) -> None:
    exact = torch.tensor([1 / 3])
    torch.save({"module": {"a": exact.bfloat16()}}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"a": exact}, tmp_path / "frozen.pt")
    assert torch.equal(read_state_dict(tmp_path)["a"], exact)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "weights.pt"
    save(out, {"a": torch.ones(2)})

    def full_disk(state: object, file) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        save(out, {"a": torch.zeros(2)})
    assert torch.equal(read_state_dict(out)["a"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


def test_a_written_file_has_ordinary_permissions(tmp_path: Path) -> None:
    save(tmp_path / "weights.pt", {"a": torch.ones(2)})
    (tmp_path / "plain").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("weights.pt", "plain")]
    assert modes[0] == modes[1]


def test_another_suffix_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "in.pt")
    assert main(["export", str(tmp_path / "in.pt"), str(tmp_path / "out.bin")]) == 2
    assert "must end in one of .pt, .pth, .safetensors" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_that_do_not_fit_onto_the_disk_are_refused_in_one_line(tmp_path: Path, suffix: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(UserError, match="File too large; free some space"):
            save(tmp_path / f"weights{suffix}", {"weight": torch.zeros(1 << 18)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short"])
def test_damaged_final_weights_of_a_run_folder_are_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "weights.pt").write_bytes(content)
    with pytest.raises(UserError, match="weights.pt: damaged .*; remove it"):
        read_state_dict(tmp_path)
