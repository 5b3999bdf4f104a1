"""Another package named op_builder, as DeepSpeed's source tree has one, is told from this project's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rwkv_clip.ops.builders import check_op_builder

REPOSITORY = Path(__file__).parents[2]


def test_this_project_s_package_is_found():
    check_op_builder()


@pytest.mark.parametrize("module", ["rwkv_clip.cli report", "wkv6"])
def test_another_package_of_the_name_is_named_in_one_line(tmp_path, module):
    (tmp_path / "op_builder").mkdir()
    (tmp_path / "op_builder" / "__init__.py").touch()
    command = ["-m", *module.split()]
    if module == "wkv6":
        command = ["-c", "import rwkv_clip.ops; rwkv_clip.ops.prepare('cpu')"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    run = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, cwd=tmp_path)
    lines = [line for line in run.stderr.splitlines() if f"Python finds the one in {tmp_path}, perhaps" in line]
    assert len(lines) == 1 and f"put {REPOSITORY} first in PYTHONPATH" in lines[0]
    assert "Traceback" not in run.stderr and (run.returncode == 2) is (module != "wkv6")
