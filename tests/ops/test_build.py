"""Building an op: missing tools, locks, several processes, any working folder. Most of it with a stub op."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from op_builder import ALL_OPS, OpBuildError, WKV6Builder, WKV6CPUBuilder, toolchain
from op_builder.lock import build_lock
from rwkv_clip.errors import UserError
from rwkv_clip.ops import prepare

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def environment(extensions: Path, **changes: str) -> dict[str, str]:
    """A small environment for a process that builds into `extensions`."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(extensions),
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "OMP_NUM_THREADS": "1",
        **changes,
    }


def start_stub(env: dict[str, str]) -> subprocess.Popen:
    """A process that builds the stub op, started from `/`."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "stub_op.py")],
        cwd="/",
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, seconds: float = 100) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a process that ends in time."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def stub_name() -> str:
    from stub_op import StubBuilder

    return StubBuilder().jit_name()


def test_K3_a_stale_lock_of_torch_is_removed_and_named(tmp_path):
    folder = tmp_path / stub_name()
    folder.mkdir()
    (folder / "lock").touch()
    status, out, err = finish(start_stub(environment(tmp_path)))
    assert status == 0, err
    assert "loaded rwkv_clip_stub" in out
    assert f"removing {folder / 'lock'}, left by a build that was killed" in err


def test_K3_nobody_waits_for_a_builder_that_was_killed(tmp_path):
    code = "import sys, time, pathlib; from op_builder.lock import build_lock\n"
    code += "with build_lock(pathlib.Path(sys.argv[1]), 'stub'): print('held', flush=True); time.sleep(100)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    started = time.time()
    with build_lock(tmp_path, "stub"):
        assert time.time() - started < 10
    holder.wait()


def test_K3_who_waits_says_for_whom(tmp_path, capfd):
    with build_lock(tmp_path, "stub"):
        release = threading.Event()
        waiter = threading.Thread(target=lambda: [build_lock(tmp_path, "stub").__enter__(), release.set()], daemon=True)
        waiter.start()
        deadline = time.time() + 20
        text = ""
        while "waiting" not in text and time.time() < deadline:
            time.sleep(0.1)
            text += capfd.readouterr().err
        assert re.search(rf"waiting \d+ s for process {os.getpid()} on \S+ to build the op stub", text)
        assert not release.is_set()
    assert release.wait(20)


def test_a_build_that_fails_is_not_repeated_by_those_who_waited(tmp_path):
    calls = tmp_path / "calls"
    compiler = script(tmp_path / "c++", f'case "$*" in *stub_op.cpp*) echo call >> {calls}; sleep 8; {COMPLAIN}; esac')
    processes = [start_stub(environment(tmp_path / "extensions", CXX=compiler)) for _ in range(2)]
    outcomes = [finish(process) for process in processes]
    assert [status for status, _, _ in outcomes] == [1, 1], outcomes
    assert all(err.count(COMPLAINT) == 1 for _, _, err in outcomes), outcomes
    assert calls.read_text() == "call\n"


def test_a_finished_build_needs_no_compiler_and_waits_for_nobody(tmp_path):
    assert finish(start_stub(environment(tmp_path)))[0] == 0
    with build_lock(tmp_path / stub_name(), "stub"):
        status, out, err = finish(start_stub(environment(tmp_path, PATH="/no/such", CXX="/no/such/c++")))
    assert status == 0, err
    assert "loaded rwkv_clip_stub" in out and "[rwkv-clip]" not in err


COMPLAINT = "stub_op.cpp:1:1: error: this compiler is out of order"
COMPLAIN = f"echo '{COMPLAINT}' >&2; echo 'stub_op.cpp:2:1: error: and more' >&2; exit 1"


def script(path: Path, text: str) -> str:
    path.write_text(f'#!/bin/sh\n{text}\nexec c++ "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_K7_an_environment_without_path_builds(tmp_path):
    env = {"PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path), "HOME": str(tmp_path)}
    status, out, err = finish(start_stub(env))
    assert status == 0, err
    assert "loaded rwkv_clip_stub" in out


def test_K7_ninja_is_found_beside_the_interpreter(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert os.access(os.path.join(toolchain.ninja_folder(), "ninja"), os.X_OK)
    with toolchain.tools_on_path():
        assert os.environ["PATH"].startswith("/usr/bin:/bin:")
    assert os.environ["PATH"] == "/usr/bin:/bin"


def test_K8_the_compilers_own_line_is_shown_once(tmp_path):
    compiler = script(tmp_path / "c++", f'case "$*" in *stub_op.cpp*) {COMPLAIN}; esac')
    status, _, err = finish(start_stub(environment(tmp_path, CXX=compiler)))
    assert status == 1
    assert err.count(COMPLAINT) == 1
    assert "and more" not in err and "Traceback" not in err
    assert "Set CXX" in err


@pytest.mark.skipif(toolchain.nvcc_version() is None, reason="needs nvcc")
def test_K8_a_compiler_too_new_for_nvcc_gets_the_way_out(tmp_path):
    compiler = script(tmp_path / "g++", 'exec c++ -U__GNUC__ -D__GNUC__=99 "$@"')
    (tmp_path / "empty.cu").write_text("__global__ void f() {}\n")
    nvcc = os.path.join(toolchain.cuda_home(), "bin", "nvcc")
    command = [nvcc, "-ccbin", compiler, "-c", "empty.cu", "-o", "empty.o"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0
    output = f"Error building extension 'wkv6': [1/2] {' '.join(command)}\nFAILED: empty.o\n{run.stderr}{run.stdout}"
    line = toolchain.first_error_line(output)
    assert "unsupported GNU version" in line
    assert all(word in toolchain.way_out(line) for word in ("CC", "CXX", "NVCC_PREPEND_FLAGS"))


@pytest.fixture
def no_nvcc(monkeypatch):
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)


def test_K1_without_nvcc_the_cuda_op_says_what_is_missing_and_the_cpu_op_builds(no_nvcc, capsys):
    builder = WKV6Builder()
    assert builder.is_compatible(verbose=False) is False
    assert "nvcc" in builder.error_log and "CUDA_HOME" in builder.error_log
    with pytest.raises(OpBuildError, match="The op wkv6 cannot be built: no nvcc: .*CUDA_HOME is not set") as caught:
        builder.jit_load()
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
    assert WKV6CPUBuilder().is_compatible()
    assert prepare("cpu") == "cpu"


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")
def test_K1_asking_for_the_cuda_op_is_a_user_error_of_one_line(no_nvcc):
    with pytest.raises(UserError, match="no nvcc") as caught:
        prepare("cuda")
    assert "\n" not in str(caught.value)


def test_a_cuda_home_without_nvcc_is_no_toolkit(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "cuda_home", lambda: str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.nvcc_version() is None
    assert f"CUDA_HOME is {tmp_path}" in WKV6Builder().incompatible_reason()


@pytest.mark.parametrize("missing, reason", [("CXX", "no C\\+\\+ compiler"), ("deepspeed", "without DeepSpeed")])
def test_without_the_means_to_build_the_cpu_falls_back_to_torch_and_says_so_once(missing, reason, tmp_path):
    code = f"""
import sys
if {missing!r} == "deepspeed":
    sys.modules["deepspeed"] = None
import torch
import rwkv_clip.ops as ops
r, k, v, w = torch.randn(4, 1, 9, 2, 8).unbind()
u = torch.randn(2, 8, requires_grad=True)
for _ in range(3):
    y = ops.wkv6(r, k, v, w, u)
y.sum().backward()
error = (y - ops.wkv6_reference(r, k, v, w, u)).abs().max()
print(ops.prepare("cpu"), bool(error < 1e-4), u.grad.shape)
"""
    env = environment(tmp_path, **({"CXX": "/no/such/c++"} if missing == "CXX" else {}))
    run = subprocess.run([sys.executable, "-c", code], cwd="/", env=env, capture_output=True, text=True, timeout=100)
    assert run.stdout.splitlines()[-1] == "torch True torch.Size([2, 8])", run.stderr
    assert len(re.findall(reason, run.stderr)) == 1
    assert run.stderr.count("slower torch implementation") == 1


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(blocked))
    with pytest.raises(OpBuildError, match=f"{blocked}.*set TORCH_EXTENSIONS_DIR"):
        WKV6CPUBuilder().jit_load()


def test_builders_follow_deepspeeds_conventions():
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder

    assert issubclass(WKV6Builder, CUDAOpBuilder) and not issubclass(WKV6CPUBuilder, CUDAOpBuilder)
    for name, builder_class in ALL_OPS.items():
        builder = builder_class()
        assert isinstance(builder, OpBuilder)
        assert builder_class.BUILD_VAR == f"DS_BUILD_{name.upper()}"
        assert builder.name == builder_class.NAME == name
        assert builder.absolute_name() == f"rwkv_clip.ops.{name}_op"
        for path in (*builder.sources(), *builder.include_paths()):
            assert not os.path.isabs(path), "setup.py wants relative paths"
            assert Path(builder.deepspeed_src_path(path)).exists()


def test_the_build_folder_is_named_after_all_that_the_binary_depends_on(monkeypatch):
    builder = WKV6CPUBuilder()
    name = builder.jit_name()
    assert re.fullmatch(r"rwkv_clip_wkv6_cpu_[0-9a-f]{10}", name)
    assert name == WKV6CPUBuilder().jit_name() != WKV6Builder().jit_name()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert builder.jit_name() != name
    monkeypatch.undo()
    monkeypatch.setattr(builder, "FILES", builder.FILES[:-1])
    assert builder.jit_name() != name


def test_deepspeed_does_not_take_our_op_builder_for_its_own():
    code = "import sys, op_builder; print('deepspeed' in sys.modules, hasattr(op_builder, '__deepspeed__'))\n"
    code += "from deepspeed.accelerator import get_accelerator; print(get_accelerator().op_builder_dir())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.stdout.splitlines()[0] == "False False", run.stderr
    assert run.stdout.splitlines()[-1].startswith("deepspeed.ops.op_builder")


def exported(library: Path) -> str:
    return subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("nm") is None, reason="needs g++ and nm")
def test_a_static_libstdcpp_inside_an_op_is_not_seen_by_others(tmp_path):
    source = tmp_path / "raises.cpp"
    source.write_text('#include <stdexcept>\nextern "C" void raises() { throw std::runtime_error("x"); }\n')
    command = ["g++", "-shared", "-fPIC", "-static-libstdc++", source, "-o"]
    for name, flags in (("open", []), ("op", WKV6CPUBuilder().extra_ldflags())):
        run = subprocess.run([*command, tmp_path / f"{name}.so", *flags], capture_output=True, text=True)
        if "cannot find -lstdc++" in run.stderr:
            pytest.skip("the compiler has no static libstdc++")
        assert run.returncode == 0, run.stderr
    assert " __cxa_throw" in exported(tmp_path / "open.so")
    symbols = exported(tmp_path / "op.so")
    assert " raises" in symbols and "__cxa" not in symbols and "_ZNSt" not in symbols


def test_every_build_of_an_op_hides_what_static_libraries_bring(tmp_path):
    status, _, err = finish(start_stub(environment(tmp_path)))
    assert status == 0, err
    assert "--exclude-libs,ALL" in next(tmp_path.rglob("build.ninja")).read_text()
    assert all("-Wl,--exclude-libs,ALL" in builder().extra_ldflags() for builder in ALL_OPS.values())
