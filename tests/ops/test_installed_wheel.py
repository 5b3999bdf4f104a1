"""A wheel, installed without its checkout and used from `/`: sources of the ops, JSON files, launch files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the checkout, made from a copy of what belongs to it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    skip = shutil.ignore_patterns("__pycache__", "*.so", "prebuilt.json")
    for name in ("rwkv_clip", "op_builder", "ds_configs", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", "dist", "."]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DS_BUILD_")}
    subprocess.run(command, cwd=folder, env=env, check=True)
    (path,) = (folder / "dist").glob("rwkv_clip-*.whl")
    return path


def test_the_wheel_holds_every_module_and_data_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, pattern in (("rwkv_clip", "*.py"), ("op_builder", "*.py"), ("rwkv_clip", "configs/*.json")):
        for path in (ROOT / folder).rglob(pattern):
            assert path.relative_to(ROOT).as_posix() in names
    for path in (ROOT / "rwkv_clip/ops/csrc").iterdir():
        assert path.relative_to(ROOT).as_posix() in names
    shared = {name.split("/share/rwkv-clip/")[1] for name in names if "/share/rwkv-clip/" in name}
    assert "launch/train.py" in shared
    assert {f"ds_configs/{path.name}" for path in (ROOT / "ds_configs").glob("*.json")} <= shared
    assert not any(name.startswith("tests/") for name in names)


JOB = """
import sys
import torch, rwkv_clip, rwkv_clip.ops as ops, op_builder
from rwkv_clip.model.config import load_config
torch.manual_seed(0)
r, k, v, w = torch.randn(4, 1, 9, 2, int(sys.argv[1])).unbind()
u = torch.randn(2, int(sys.argv[1]))
error = (ops.wkv6(r, k, v, w, u) - ops.wkv6_reference(r, k, v, w, u)).abs().max()
print(rwkv_clip.__file__, op_builder.__file__)
print(ops.prepare("cpu"), bool(error < 1e-3), load_config("RWKV-CLIP-B-32").name)
"""


def test_K5_K7_K9_two_jobs_of_an_installed_wheel_start_at_once_from_anywhere_with_nothing_built(wheel, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    env = {
        "PYTHONPATH": str(site),
        "HOME": str(tmp_path),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "OMP_NUM_THREADS": "1",
    }  # no PATH, as in a bare ssh command
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, head_size],
            cwd="/",
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for head_size in ("64", "80")
        for _ in range(2)
    ]
    outcomes = [rank.communicate(timeout=400) for rank in ranks]
    for out, err in outcomes:
        lines = out.splitlines()[-2:]
        assert lines == [f"{site}/rwkv_clip/__init__.py {site}/op_builder/__init__.py", "cpu True RWKV-CLIP-B-32"], err
    assert sum(err.count("building the op wkv6_cpu, once") for _, err in outcomes) == 1
