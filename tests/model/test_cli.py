"""The command `rwkv-clip` as such: how it ends when it is not let to its end."""

from __future__ import annotations

import importlib
import subprocess
import sys

from rwkv_clip.cli import main


def test_ctrl_c_while_a_command_is_imported_is_one_line(monkeypatch, capsys):
    def interrupted(_name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["report"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback():
    words = ["plan", "--model", "Nano", "--batch", "4"]
    code = f"import sys; from rwkv_clip.cli import main; sys.stdin.read(); sys.exit(main({words}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    _, errors = process.communicate()
    assert (process.returncode, errors) == (141, "")
