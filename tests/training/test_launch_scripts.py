"""The shell scripts in launch/, up to the commands that they start."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rwkv_clip.training.arguments import parse_arguments

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "launch" / "recipes"
LAUNCHER = """#!/bin/sh
pwd
printf '%s\\n' "$@"
"""


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.sh")), ids=lambda path: path.stem)
def test_a_recipe_takes_paths_as_seen_from_where_it_is_called(recipe, tmp_path):
    launcher, caller = tmp_path / "bin" / "deepspeed", tmp_path / "my work"
    launcher.parent.mkdir()
    caller.mkdir()
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    paths = ["data", "runs/first one"] if "WEIGHTS" not in recipe.read_text() else ["my.pt", "data", "runs/first one"]
    started = subprocess.run(
        ["bash", os.path.relpath(recipe, caller), *paths, "--eval-data", "sets"],
        cwd=caller,
        env={**os.environ, "PATH": f"{launcher.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    folder, *words = started.stdout.splitlines()
    script = next(i for i, word in enumerate(words) if word.endswith("launch/train.py"))
    args = parse_arguments(words[script + 1 :])
    assert Path(folder) == caller.resolve()
    assert (args.train_data, args.output, args.eval_data) == ("data", "runs/first one", "sets")
    assert Path(words[script]).is_file() and Path(words[script]).is_absolute()
    assert Path(args.deepspeed_config).is_file() and Path(args.deepspeed_config).is_absolute()


def test_the_installer_ends_with_the_line_that_makes_the_commands_known(tmp_path):
    checkout = tmp_path / "a checkout"
    (checkout / "launch").mkdir(parents=True)
    (checkout / ".venv").mkdir()
    for name in ("setup.py", "constraints.txt", "launch/install.sh"):
        shutil.copy(ROOT / name, checkout / name)
    versions = hashlib.sha256((ROOT / "setup.py").read_bytes() + (ROOT / "constraints.txt").read_bytes()).hexdigest()
    (checkout / ".venv" / f".installed-{versions[:16]}").touch()  # everything is there already
    (checkout / ".venv" / "bin").mkdir()
    (checkout / ".venv" / "bin" / "activate").write_text("echo active")
    printed = subprocess.run(
        ["bash", checkout / "launch" / "install.sh"], capture_output=True, text=True, check=True
    ).stdout
    command = printed.splitlines()[-1].split(": ")[1]
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout == "active\n"
