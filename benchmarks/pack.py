"""How many images a second `rwkv-clip pack` checks and packs, beside a plain loop with mxnet.

    python benchmarks/pack.py [--images 8000] [--workers 2]

Makes JPEGs of 500 x 375 pixels (about 37 KB) with three captions each in a temporary folder, packs them with full
checking through the command line, start-up included, and, where `.venv-mxnet` has mxnet and OpenCV, packs the same
files with `cv2.imread` + `mxnet.recordio.pack_img`, which neither checks nor tokenizes, in one process.

    python3.11 -m venv .venv-mxnet
    .venv-mxnet/bin/pip install numpy==1.23.5 mxnet==1.9.1 opencv-python-headless==4.8.1.78
"""

from __future__ import annotations

import argparse
import io
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

ROOT = Path(__file__).parents[1]
MXNET_LOOP = """
import sys, time
import cv2
import mxnet as mx
import numpy as np

folder, out = sys.argv[1:]
label = np.zeros(231, np.float32)
writer = mx.recordio.MXIndexedRecordIO(out + ".idx", out + ".rec", "w")
names = [line.split("\\t")[0] for line in open(folder + "/pairs.tsv", encoding="utf-8")][1:]
start = time.perf_counter()
for i, name in enumerate(names):
    header = mx.recordio.IRHeader(0, label, i, 0)
    writer.write_idx(i, mx.recordio.pack_img(header, cv2.imread(folder + "/" + name)))
writer.close()
print(len(names) / (time.perf_counter() - start))
"""


def make_images(folder: Path, count: int) -> float:
    """Write `count` JPEGs that look like photos to a codec, and pairs.tsv; return their mean size in bytes."""
    rng = np.random.default_rng(0)
    base = []
    for _ in range(16):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize(
            (560, 420), Image.Resampling.BICUBIC
        )
        noise = rng.normal(0, 14, (420, 560, 3))
        textured = Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8))
        base.append(textured.filter(ImageFilter.GaussianBlur(0.8)))
    lines, size = ["image\traw\tsynthetic\tgenerated"], 0
    for i in range(count):
        x, y = rng.integers(0, 60), rng.integers(0, 45)
        data = io.BytesIO()
        base[i % len(base)].crop((x, y, x + 500, y + 375)).save(data, "JPEG", quality=80)
        size += data.tell()
        (folder / f"{i:06}.jpg").write_bytes(data.getvalue())
        lines.append(
            f"{i:06}.jpg\tIMG_{i:04} – my dog &amp; me at the beach, summer\ta photo of a dog on a beach\t"
            f"A brown dog runs along a sandy beach while gentle waves roll in under a bright blue sky, number {i}."
        )
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return size / count


def cpu_seconds() -> float:
    """Processor time of all processes that were started here and have ended; a busy machine changes it little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mxnet-python", type=Path, default=ROOT / ".venv-mxnet/bin/python")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mean = make_images(folder, args.images)
        print(f"{args.images} JPEGs of 500 x 375, {mean / 1000:.1f} KB on average")
        command = [sys.executable, "-m", "rwkv_clip.cli", "pack", str(folder / "pairs.tsv"), str(folder / "out")]
        command += ["--workers", str(args.workers), "--shard-size", str(max(1, args.images // (4 * args.workers)))]
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        ours = args.images / (time.perf_counter() - start)
        our_cpu = cpu_seconds()
        print(
            f"rwkv-clip pack, {args.workers} processes, every image decoded in full: {ours:,.0f} images/s "
            f"({1000 * our_cpu / args.images:.2f} ms of CPU each, start-up included)"
        )
        if not args.mxnet_python.exists():
            print(f"mxnet loop: not measured, {args.mxnet_python} is missing (see this file's first lines)")
            return
        loop = [str(args.mxnet_python), "-c", MXNET_LOOP, str(folder), str(folder / "mxnet")]
        done = subprocess.run(loop, capture_output=True, text=True)
        if done.returncode:
            print(f"mxnet loop: not measured: {done.stderr.strip().splitlines()[-1]}")
            return
        theirs = float(done.stdout)
        their_cpu = cpu_seconds() - our_cpu
        print(
            f"cv2.imread + mxnet pack_img, one process, nothing checked: {theirs:,.0f} images/s "
            f"({1000 * their_cpu / args.images:.2f} ms of CPU each, start-up included)"
        )
        print(f"ratio: {ours / theirs:.1f} in images/s, {their_cpu / our_cpu:.1f} in CPU time per image")


if __name__ == "__main__":
    main()
