"""What a build needs from the machine, what is missing, and what a failed build says, each as one line for the user."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch


class OpBuildError(RuntimeError):
    """An op cannot be built here. One line: which, why, and what to do."""


def ninja_folder() -> str | None:
    """Folder of ninja, found beside the interpreter too: a venv started by its full path is not on PATH."""
    candidates = [shutil.which("ninja"), str(Path(sys.executable).parent / "ninja")]
    with contextlib.suppress(ImportError):
        import ninja

        candidates.append(os.path.join(ninja.BIN_DIR, "ninja"))
    found = next((path for path in candidates if path and os.access(path, os.X_OK)), None)
    return os.path.dirname(found) if found else None


@contextlib.contextmanager
def tools_on_path() -> Iterator[None]:
    """PATH with ninja's folder in it, and with the system's default folders when PATH is not set at all."""
    before = os.environ.get("PATH")
    folders = [before or os.defpath, ninja_folder()]
    os.environ["PATH"] = os.pathsep.join(folder for folder in folders if folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def extensions_root() -> str:
    """Folder of torch's just-in-time builds: TORCH_EXTENSIONS_DIR, or a folder of the user's cache."""
    from torch.utils.cpp_extension import get_default_build_root

    return os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()


def compiler_version() -> str:
    """First line that the C++ compiler says about itself."""
    from torch.utils.cpp_extension import get_cxx_compiler

    compiler = get_cxx_compiler()
    try:
        return subprocess.check_output([*shlex.split(compiler), "--version"], text=True).splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return f"none: {compiler!r} does not run"


def missing_for_cpp() -> list[str]:
    """What is missing to compile C++ for torch."""
    from torch.utils.cpp_extension import get_cxx_compiler

    missing = []
    compiler = get_cxx_compiler()
    with tools_on_path():
        if shutil.which(shlex.split(compiler)[0]) is None:
            missing.append(f"no C++ compiler: {compiler!r} not found; install g++ or set CXX")
    if ninja_folder() is None:
        missing.append("no ninja: pip install ninja")
    return missing


def missing_for_cuda() -> list[str]:
    """What is missing to compile CUDA code for this torch. A device is not needed for that."""
    missing = []
    home, version = cuda_home(), nvcc_version()
    if version is None:
        setting = os.environ.get("CUDA_HOME", "not set")
        missing.append(
            "no nvcc: install the CUDA toolkit, then put nvcc on PATH or set CUDA_HOME to the toolkit's folder "
            f"(CUDA_HOME is {setting})"
        )
    elif not os.path.isfile(os.path.join(home, "include", "cuda_runtime_api.h")):
        missing.append(f"no include/cuda_runtime_api.h in {home}, where nvcc is: set CUDA_HOME to the toolkit's folder")
    if torch.version.cuda is None:
        missing.append(f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch")
    elif version is not None and version[0] != int(torch.version.cuda.split(".")[0]):
        missing.append(
            f"nvcc is of CUDA {version[0]}.{version[1]}, torch of CUDA {torch.version.cuda}: set CUDA_HOME to a "
            "toolkit of torch's major version"
        )
    return missing + missing_for_cpp()


def missing_device() -> list[str]:
    return [] if torch.cuda.is_available() else ["no CUDA device is visible (torch.cuda.is_available() is False)"]


def cuda_home() -> str | None:
    """The CUDA toolkit's folder: what torch found, or, as a CPU build of torch does not look, where it would look."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is not None:
        return CUDA_HOME
    nvcc = shutil.which("nvcc")
    found = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (nvcc and str(Path(nvcc).parent.parent))
    return found or ("/usr/local/cuda" if os.path.exists("/usr/local/cuda") else None)


def nvcc_version() -> tuple[int, int] | None:
    """(major, minor) of the toolkit's nvcc; None when it is missing or does not run."""
    home = cuda_home()
    if home is None:
        return None
    try:
        text = subprocess.check_output([os.path.join(home, "bin", "nvcc"), "--version"], text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def default_cuda_archs() -> str:
    """Architectures of an ahead-of-time build: all from Ampere on that this nvcc knows, PTX for later ones."""
    version = nvcc_version()
    return "8.0;8.6;8.9;9.0;10.0;12.0+PTX" if version and version >= (12, 8) else "8.0;8.6;8.9;9.0+PTX"


def first_error_line(output: str) -> str:
    """The compiler's (or linker's) own first complaint in the output of a build."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for pattern in (r"\berror\b", r"not found|No such file|cannot find|undefined reference|[Kk]illed"):
        for line in lines:
            # ninja's and torch's own lines only announce that there is an error.
            if re.search(pattern, line) and not re.match(r"Error building extension|ninja: |FAILED: ", line):
                return line
    return lines[-1] if lines else "no output"


def way_out(error_line: str) -> str:
    """What a user can do about that line."""
    if re.search(r"unsupported (GNU|clang|Microsoft)|greater than the maximum", error_line):
        return (
            "The C++ compiler is too new for this nvcc: set CC and CXX to an older one (and "
            "NVCC_PREPEND_FLAGS='-ccbin g++-13'), or at your own risk NVCC_PREPEND_FLAGS=-allow-unsupported-compiler"
        )
    if "No space left" in error_line:
        return "Free some space, or set TORCH_EXTENSIONS_DIR to a folder on another disk"
    if re.search(r"[Kk]illed", error_line):
        return "The machine ran out of memory: set MAX_JOBS=1"
    if "Python.h" in error_line:
        return "Install Python's headers (python3-dev)"
    return "Set CXX (and CC) to another compiler if this one cannot compile PyTorch's headers"
