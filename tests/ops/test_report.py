"""`rwkv-clip report`."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from op_builder import ALL_OPS, prebuilt, toolchain
from rwkv_clip.cli import main
from rwkv_clip.ops import report


def rows(text: str) -> dict[str, str]:
    """The report's lines with dots in them: the name, then the rest."""
    found = {}
    for line in text.splitlines():
        name, dots, rest = line.partition(" .")
        if dots:
            found[name] = rest.lstrip(".").strip()
    return found


def test_the_report_has_ds_reports_form(capsys):
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    assert "op name ................ installed .. compatible" in text
    assert "wkv6_cpu ............... [NO] ....... [OKAY]" in text
    assert "\033" not in text, "no colours outside a terminal"
    found = rows(text)
    assert found["torch version"] == torch.__version__
    assert {"deepspeed", "nvcc version", "CUDA toolkit", "C++ compiler", "GPUs", "python version"} <= set(found)
    assert any(name.startswith("nvidia-dali") for name in found)


def test_what_is_not_compatible_has_its_reason_below(capsys, monkeypatch):
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["report"])
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("wkv6 ."))
    assert lines[at].endswith("[NO]")
    assert "nvcc" in lines[at + 1] and "CUDA_HOME" in lines[at + 1]


def test_the_report_works_without_deepspeed(capsys, monkeypatch):
    for name in ("all_ops", "builder", "cuda", "wkv6", "lerp", "wkv6_cpu"):
        monkeypatch.delitem(sys.modules, f"op_builder.{name}", raising=False)
    for name in ["deepspeed", *(name for name in sys.modules if name.startswith("deepspeed."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    assert text.count("DeepSpeed, which builds the ops, cannot be imported") == len(ALL_OPS)


@pytest.mark.parametrize("built_with, used", [(torch.__version__, True), ("1.0.0", False)])
def test_an_op_compiled_ahead_of_time_is_used_with_its_own_torch_only(built_with, used, monkeypatch, tmp_path, capsys):
    record = tmp_path / "prebuilt.json"
    record.write_text(json.dumps({"torch": built_with, "ops": ["wkv6_cpu"]}))
    monkeypatch.setattr(prebuilt, "RECORD", record)
    monkeypatch.setattr(prebuilt.importlib, "import_module", lambda name: name)
    assert prebuilt.import_prebuilt("wkv6") is None
    assert prebuilt.import_prebuilt("wkv6_cpu") == ("rwkv_clip.ops.wkv6_cpu_op" if used else None)
    assert ("was compiled for torch 1.0.0" in capsys.readouterr().err) is not used
    statuses = {status.name: status.installed for status in report.op_status()}
    assert statuses == {name: name == "wkv6_cpu" for name in ALL_OPS}
