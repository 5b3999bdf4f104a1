"""The CUDA sources compile, also where there is no GPU."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from op_builder import LerpBuilder, WKV6Builder, toolchain

ROOT = Path(__file__).resolve().parent.parent.parent
CSRC = ROOT / "rwkv_clip" / "ops" / "csrc"
NVCC_VERSION = toolchain.nvcc_version()

needs_nvcc = pytest.mark.skipif(NVCC_VERSION is None, reason="needs nvcc")


def cuda_include() -> str | None:
    """Folder of cuda_runtime_api.h, as nvcc itself finds it (its own folder may hold only a link or a script)."""
    nvcc = os.path.join(toolchain.cuda_home(), "bin", "nvcc")
    run = subprocess.run(
        [nvcc, "-x", "cu", "-M", "-"], input="#include <cuda_runtime_api.h>\n", capture_output=True, text=True
    )
    words = (word for word in run.stdout.split() if word.endswith("/cuda_runtime_api.h"))
    return next((os.path.dirname(word) for word in words), None)


def quick(nvcc: str) -> list[str]:
    """The flag of newer nvccs to leave out what makes code fast, which takes most of the time."""
    flags = subprocess.run([nvcc, "--help"], capture_output=True, text=True).stdout
    return ["--Ofast-compile=max"] if "--Ofast-compile" in flags else []


SOURCES = sorted(path.name for path in CSRC.glob("*.cu"))


@pytest.fixture(scope="module")
def errors(tmp_path_factory, request) -> dict[str, str]:
    """What nvcc says against each source; empty if it compiles for both machines."""
    folder = tmp_path_factory.mktemp("kernels")
    nvcc = os.path.join(toolchain.cuda_home(), "bin", "nvcc")
    # Optimised for one of them: the source differs between them in a few lines, not in what is hard to compile.
    targets = {"ampere": ["-arch=sm_80", "-cubin", *quick(nvcc)], "hopper": ["-arch=sm_90", "-Xcompiler=-fPIC", "-c"]}
    headers = b"".join(path.read_bytes() for path in [*sorted(CSRC.glob("*.cuh")), *sorted(CSRC.glob("*.h"))])

    def compile(job: tuple[str, str]) -> str:
        source, target = job
        command = [nvcc, "-O3", "-std=c++17", *targets[target], str(CSRC / source)]
        # Minutes of work: not again for the sources that compiled in the last run.
        said = f"{NVCC_VERSION} {command[1:-1]}".encode()
        digest = hashlib.sha256(said + (CSRC / source).read_bytes() + headers).hexdigest()
        if request.config.cache.get(f"nvcc/{source}/{target}", None) == digest:
            return ""
        run = subprocess.run([*command, "-o", folder / f"{source}.{target}"], capture_output=True, text=True)
        if run.returncode == 0:
            request.config.cache.set(f"nvcc/{source}/{target}", digest)
        return "" if run.returncode == 0 else f"{target}: {run.stderr[-3000:]} "

    # The slow ones first.
    jobs = [(source, target) for target in reversed(targets) for source in SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(jobs, pool.map(compile, jobs), strict=True))
    return {source: "".join(found[source, target] for target in targets) for source in SOURCES}


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES)
def test_each_kernel_compiles_for_ampere_and_hopper(source, errors):
    assert not errors[source], errors[source]


@pytest.mark.parametrize("builder", [WKV6Builder, LerpBuilder])
def test_a_builder_compiles_every_cuda_source_of_its_op_and_the_binding(builder):
    name = builder.NAME
    sources = {Path(source).name for source in builder().sources()}
    assert sources == {path.name for path in CSRC.glob(f"{name}_cuda*.c*") if path.suffix in (".cu", ".cpp")}
    assert f"{name}_cuda_binding.cpp" in sources and f"{name}_cuda.cu" in sources


@needs_nvcc
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", ["wkv6", "lerp"])
def test_the_binding_compiles_against_pytorchs_headers(tmp_path, name):
    folder = cuda_include()
    if folder is None:
        pytest.skip("no cuda_runtime_api.h")
    # A CPU build of torch has all headers but this one, which its CUDA builds generate.
    generated = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    generated.parent.mkdir(parents=True)
    generated.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    standard = "c++20" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else "c++17"
    paths = [*include_paths(), sysconfig.get_paths()["include"], folder, str(tmp_path), str(CSRC)]
    command = [
        "g++",
        f"-std={standard}",
        "-fsyntax-only",
        "-DTORCH_EXTENSION_NAME=wkv6",
        *(f"-I{path}" for path in paths),
    ]
    run = subprocess.run([*command, CSRC / f"{name}_cuda_binding.cpp"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
