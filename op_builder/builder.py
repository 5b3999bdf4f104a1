"""What this project's op builders share: sources inside the installed package, and a build that is safe on many ranks.

Each op is a class of its own file, derived from RWKVOpBuilder and from DeepSpeed's CUDAOpBuilder or CPUOpBuilder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

import torch

from . import toolchain
from .lock import build_lock, say
from .prebuilt import import_prebuilt, module_name
from .toolchain import OpBuildError

# The folder that holds `op_builder` and `rwkv_clip`: the checkout, or site-packages.
ROOT = Path(__file__).resolve().parent.parent
CSRC = "rwkv_clip/ops/csrc"


class RWKVOpBuilder:
    """The part of a builder that does not depend on the device. Goes before DeepSpeed's class in the bases.

    Paths in `sources` and `include_paths` are relative to ROOT, as setup.py wants them.
    """

    BUILD_VAR: str  # environment variable that makes setup.py compile the op
    NAME: str
    FILES: tuple[str, ...]  # glob patterns, relative to ROOT: the builder's own file and all that the compiler reads

    _loaded: dict[str, ModuleType] = {}

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        return module_name(self.NAME)

    def deepspeed_src_path(self, code_path: str) -> str:
        return str(ROOT / code_path)

    def include_paths(self) -> list[str]:
        return [CSRC]

    def extra_ldflags(self) -> list[str]:
        # Where the compiler has libstdc++ as a static library only, the op gets a copy of it. Were its symbols visible,
        # some would be bound to those of torch's libstdc++ instead, and an op that raises would end the process.
        return ["-Wl,--exclude-libs,ALL"]

    def missing_for_build(self) -> list[str]:
        """What the machine lacks to compile the op, one line each."""
        return []

    def missing_here(self) -> list[str]:
        """What the machine lacks besides to run the op, one line each."""
        return []

    def incompatible_reason(self) -> str | None:
        """Why the op cannot be built just in time here, or None when it can."""
        return "; ".join(self.missing_for_build() + self.missing_here()) or None

    def is_compatible(self, verbose: bool = False) -> bool:
        reason = self.incompatible_reason()
        if reason is None:
            return True
        self.error_log = reason
        if verbose:
            self.warning(reason)
        return False

    def load(self, verbose: bool = False) -> ModuleType:
        """The op's module, compiled ahead of time or just in time. Importing it registers the operators.

        Raises:
            OpBuildError: it cannot be built here.
        """
        if self.NAME not in self._loaded:
            self._loaded[self.NAME] = import_prebuilt(self.NAME) or self.jit_load(verbose)
        return self._loaded[self.NAME]

    def target(self) -> str:
        """What a just-in-time build is compiled for, where machines that share a folder may differ."""
        return platform.machine()

    def jit_name(self) -> str:
        """Name of the just-in-time build: the op and a digest of all that its binary depends on.

        So two versions of the sources or of torch never share a folder, nor do two installations, which ninja would
        rebuild in turn. One build serves every head size and length.
        """
        settings = (
            ROOT,
            sys.version_info[:2],
            torch.__version__,
            torch.version.cuda,
            self.target(),
            self.extra_ldflags(),
        )
        digest = hashlib.sha256(repr(settings).encode())
        for pattern in self.FILES:
            for path in sorted(ROOT.glob(pattern)):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return f"rwkv_clip_{self.NAME}_{digest.hexdigest()[:10]}"

    def jit_load(self, verbose: bool = False) -> ModuleType:
        """The op's module, compiled now unless it has been before. A finished build needs no lock, tool or compiler."""
        name = self.jit_name()
        folder = _extension_folder(name)
        finished, failure = folder / "finished", folder / "failed.txt"
        if finished.exists():
            return self._import_build(name, folder)
        reason = self.incompatible_reason()
        if reason is not None:
            raise OpBuildError(f"The op {self.NAME} cannot be built: {reason}.")
        with build_lock(folder, self.NAME) as waiting_since, toolchain.tools_on_path():
            if finished.exists():
                return self._import_build(name, folder)
            if waiting_since is not None and failure.exists() and failure.stat().st_mtime >= waiting_since:
                raise OpBuildError(failure.read_text())  # tried while this process waited
            say(f"building the op {self.NAME}, once, in about a minute: {folder}")
            try:
                module = self._jit_load_as(name, verbose)
            except (RuntimeError, OSError, ImportError) as error:
                line = toolchain.first_error_line(str(error))
                message = f"The op {self.NAME} could not be built: {line}. {toolchain.way_out(line)}. (In {folder}.)"
                failure.write_text(message)
                raise OpBuildError(message) from None
            finished.touch()
            return module

    def _import_build(self, name: str, folder: Path) -> ModuleType:
        try:
            spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (ImportError, OSError) as error:
            raise OpBuildError(
                f"The op {self.NAME} does not load ({error}): delete {folder} to build it again"
            ) from None
        return module

    def _jit_load_as(self, name: str, verbose: bool) -> ModuleType:
        self.name = name  # DeepSpeed names the build folder and the module after it
        try:
            return super().jit_load(verbose)
        finally:
            self.name = self.NAME


def _extension_folder(name: str) -> Path:
    """torch's folder for a just-in-time build of that name."""
    from torch.utils.cpp_extension import _get_build_directory

    try:
        return Path(_get_build_directory(name, verbose=False))
    except OSError as error:
        raise OpBuildError(
            f"The op cannot be built: {error}; set TORCH_EXTENSIONS_DIR to a folder that you may write"
        ) from None
