"""Installation. `pip install .` compiles nothing: the ops are built just in time when they are first used.

To compile them ahead of time, by DeepSpeed's convention (the build imports torch and DeepSpeed, so they come first):

    DS_BUILD_WKV6=1 pip install --no-build-isolation .         the CUDA op (no GPU needed; see TORCH_CUDA_ARCH_LIST)
    DS_BUILD_LERP=1 pip install --no-build-isolation .         the CUDA op of the token shift
    DS_BUILD_WKV6_CPU=1 pip install --no-build-isolation .     the C++ op
    DS_BUILD_OPS=1 pip install --no-build-isolation .          each of them that this machine can compile
"""

from __future__ import annotations

import os
import re
import sys
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
OPS = {"wkv6": "DS_BUILD_WKV6", "lerp": "DS_BUILD_LERP", "wkv6_cpu": "DS_BUILD_WKV6_CPU"}


def version() -> str:
    return re.search(r'__version__ = "(.+)"', (ROOT / "rwkv_clip" / "version.py").read_text())[1]


def switched_on(variable: str) -> bool:
    return os.environ.get(variable, "0") == "1"


def extension(builder):
    from deepspeed.ops.op_builder.builder import CUDAMismatchException

    try:
        made = builder.builder()
    except CUDAMismatchException as error:
        sys.exit(f"error: {error} To try all the same: DS_SKIP_CUDA_CHECK=1")
    made.extra_link_args = builder.extra_ldflags()  # which CPUOpBuilder leaves out
    return made


def ahead_of_time() -> dict:
    """ext_modules and cmdclass for the ops that the environment asks for; nothing when it asks for none."""
    asked = [name for name, variable in OPS.items() if switched_on(variable)]
    wanted = list(OPS) if switched_on("DS_BUILD_OPS") else asked
    if not wanted:
        return {}
    sys.path.insert(0, str(ROOT))
    try:
        from torch.utils.cpp_extension import BuildExtension

        from op_builder import ALL_OPS, toolchain
        from op_builder.prebuilt import write_record
    except ImportError as error:
        sys.exit(
            f"error: compiling the ops needs torch and DeepSpeed ({error}): install them, use --no-build-isolation"
        )

    names, extensions = [], []
    with toolchain.tools_on_path():
        for name in wanted:
            builder = ALL_OPS[name]()
            missing = "; ".join(builder.missing_for_build())
            if not missing:
                names.append(name)
                extensions.append(extension(builder))
            elif name in asked:
                sys.exit(f"error: {OPS[name]}=1, but the op {name} cannot be compiled here: {missing}")
            else:
                print(f"rwkv-clip: the op {name} is not compiled: {missing}", file=sys.stderr)

    class Build(BuildExtension):
        def run(self) -> None:
            with toolchain.tools_on_path():
                super().run()
            write_record(ROOT if self.inplace else Path(self.build_lib), names)

    return {"ext_modules": extensions, "cmdclass": {"build_ext": Build}} if extensions else {}


setup(
    name="rwkv-clip",
    version=version(),
    description="RWKV-CLIP: image-text models without attention, trained with DeepSpeed",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["rwkv_clip", "rwkv_clip.*", "op_builder"]),
    package_data={
        "rwkv_clip.configs": ["*.json"],
        "rwkv_clip": ["configs/*.json"],
        "rwkv_clip.ops": ["csrc/*"],
    },
    # What a checkout has at its root, for an installation from a wheel: PREFIX/share/rwkv-clip/launch/train.py, ...
    data_files=[
        ("share/rwkv-clip/ds_configs", glob("ds_configs/*.json")),
        ("share/rwkv-clip/launch", ["launch/train.py"]),
        ("share/rwkv-clip/launch/recipes", glob("launch/recipes/*")),
    ],
    entry_points={"console_scripts": ["rwkv-clip = rwkv_clip.cli:main"]},
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.17",
        "nvidia-dali-cuda120>=1.50",
        "ninja",
        "tensorboard",
        "ftfy>=6.1",
        "instant-clip-tokenizer>=0.1.1",
        "safetensors>=0.4",
        "Pillow>=10.0",
        "numpy>=1.23",
        "tqdm",
    ],
    extras_require={
        # DALI for a CUDA 13 driver. Its files replace those of nvidia-dali-cuda120, which the base requires.
        "cuda13": ["nvidia-dali-cuda130>=1.52"],
        # Retired; its wheel fails with numpy >= 1.24. Only to compare files with it, in an environment of its own.
        "mxnet": ["mxnet==1.9.1", "numpy<1.24"],
        # Benchmark data sets are published as parquet files.
        "eval": ["pyarrow>=14"],
        # `rwkv-clip prepare pictograms` draws SVG files.
        "prepare": ["resvg-py>=0.2"],
        # `rwkv-clip prepare yfcc15m` fetches parquet files from the Hugging Face hub.
        "hub": ["huggingface_hub>=0.26", "pyarrow>=14"],
        "dev": ["pytest>=8", "hypothesis>=6", "ruff>=0.6", "huggingface_hub>=0.26"],
    },
    **ahead_of_time(),
)
