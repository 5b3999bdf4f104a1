"""How many pictures a second the training loader delivers, beside DALI's own mxnet reader in the same run.

    python benchmarks/loader.py                          the GPU if there is one; made-up JPEGs of 500 x 375, 37 KB
    python benchmarks/loader.py --data train/part-0      one packed pair of your own
    python benchmarks/loader.py --device cpu --batch-size 64 --steps 5 --records 512
    python benchmarks/loader.py --no-decoding            what feeding costs, on any machine
    python benchmarks/loader.py --feeds --json out.json  the ways to feed DALI from Python, without decoding

Rows: the loader with its decoding left out (ids, records, picture sizes, crops and captions, everything that Python
does); the whole loader; both also in a thread that does `--work-ms` of Python per batch, as a training step does; the
published pipeline on DALI's mxnet reader. The last column is what a record costs the training thread itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from nvidia.dali import Pipeline, fn, types
from pictures import make_pair

from rwkv_clip.data.augment import ASPECT, ATTEMPTS
from rwkv_clip.data.batch_reader import BatchReader
from rwkv_clip.data.dataset import Dataset, open_dataset
from rwkv_clip.data.loader import Loader
from rwkv_clip.data.pipeline import DecoderSettings, FedPipeline, decoder_arguments, encoded_list
from rwkv_clip.data.recordio import pair_paths
from rwkv_clip.data.sampler import Sampler
from rwkv_clip.errors import UserError
from rwkv_clip.model.transform import CROP_AREA, MEAN, STD

SEED = 1467
WARM_UP_STEPS = 4


def python_work(seconds: float) -> None:
    """Hold the interpreter for so much processor time, as launching a training step's kernels does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def measure(name: str, step: Callable[[], object], batch_size: int, steps: int, work_ms: float = 0) -> dict:
    """Call `step` once per batch; rate, and the calling thread's own time per record."""
    for _ in range(WARM_UP_STEPS):
        step()
    own = 0.0
    start = time.perf_counter()
    for _ in range(steps):
        before = time.thread_time()
        step()
        own += time.thread_time() - before
        python_work(work_ms / 1e3)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    records = steps * batch_size
    return {"name": name, "records_per_s": records / seconds, "thread_us_per_record": own / records * 1e6}


class Ids:
    """The ids of one batch after the other."""

    def __init__(self, dataset: Dataset, batch_size: int):
        self.sampler = Sampler(dataset.shard_sizes, SEED, batch_size)

    def __call__(self, number: int) -> np.ndarray:
        return self.sampler.batch(*divmod(number, self.sampler.steps_per_epoch))


def undecoded_pipeline(batch_size: int, image_size: int, device: torch.device, settings: DecoderSettings):
    """The training pipeline's inputs and outputs, where an image is no more than its header's sizes."""
    pipeline = Pipeline(batch_size, 2, None, prefetch_queue_depth=settings.prefetch)
    with pipeline:
        choices = fn.external_source(name="choices", dtype=types.INT32, ndim=1)
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
        sizes = fn.cat(fn.peek_image_shape(encoded, dtype=types.INT32), choices)
        pixels = fn.reshape(fn.cast(sizes[0:3], dtype=types.UINT8), shape=[3, 1, 1])
        pipeline.set_outputs(pixels, fn.external_source(name="labels", dtype=types.FLOAT, ndim=1))
    return FedPipeline(pipeline, settings.prefetch)


def loader_rows(args, dataset: Dataset, device: torch.device, settings: DecoderSettings) -> list[dict]:
    """The loader alone and in a busy thread, first with its decoding left out."""
    with mock.patch("rwkv_clip.data.loader.train_pipeline", undecoded_pipeline):
        name = "loader, decoding left out"
        rows = one_loader_rows(args, dataset, torch.device("cpu"), settings, name, steps=4 * args.steps)
    if args.no_decoding:
        return rows
    return rows + one_loader_rows(args, dataset, device, settings, "loader", args.steps)


def one_loader_rows(
    args, dataset: Dataset, device: torch.device, settings: DecoderSettings, name: str, steps: int
) -> list[dict]:
    loader = Loader(
        dataset,
        Sampler(dataset.shard_sizes, SEED, args.batch_size),
        rank=0,
        world_size=1,
        micro_batch_size=args.batch_size,
        image_size=args.image_size,
        context_length=77,
        device=device,
        seed=SEED,
        settings=settings,
    )

    def batches():
        epoch = 0
        while True:
            yield from loader.epoch(epoch)
            epoch += 1

    with loader:
        stream = batches()
        return [  # "work" is Python's, per batch
            measure(
                f"{name}, {work_ms:g} ms of Python per batch", lambda: next(stream), args.batch_size, steps, work_ms
            )
            for work_ms in (0, args.work_ms)
        ]


def mxnet_row(args, prefix: Path, device: torch.device, settings: DecoderSettings) -> dict:
    """The published pipeline on DALI's own reader: a buffer of 16,384 records, random crop in the decoder."""
    cuda = device.type == "cuda"
    pipeline = Pipeline(
        args.batch_size,
        num_threads=settings.num_threads,
        device_id=device.index if cuda else None,
        prefetch_queue_depth=settings.prefetch,
        seed=SEED,
    )
    decoder = decoder_arguments(device, settings)
    with pipeline:
        jpegs, labels = fn.readers.mxnet(
            path=f"{prefix}.rec",
            index_path=f"{prefix}.idx",
            random_shuffle=True,
            initial_fill=min(16384, args.records),
        )
        images = fn.decoders.image_random_crop(
            jpegs, random_area=CROP_AREA, random_aspect_ratio=ASPECT, num_attempts=ATTEMPTS, **decoder
        )
        images = fn.resize(images, size=(args.image_size, args.image_size), interp_type=types.INTERP_LINEAR)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            mirror=fn.random.coin_flip(probability=0.5),
        )
        pipeline.set_outputs(images, labels)
    return measure("DALI's mxnet reader, published pipeline", pipeline.run, args.batch_size, args.steps)


class BatchCallback:
    """A whole batch for `fn.external_source`, record by record."""

    def __init__(self, prefix: Path, batch_size: int):
        self.dataset = open_dataset(prefix)
        self.ids = Ids(self.dataset, batch_size)

    def __call__(self, iteration: int):
        records = [self.dataset.read(i) for i in self.ids(iteration).tolist()]
        return [np.frombuffer(record.payload, np.uint8) for record in records], np.stack([r.label for r in records])


class SampleCallback(BatchCallback):
    """One record for `fn.external_source(batch=False)`."""

    def __call__(self, info):
        record = self.dataset.read(int(self.ids(info.iteration)[info.idx_in_batch]))
        return np.frombuffer(record.payload, np.uint8), record.label


def feed_rows(args, prefix: Path, workers: int) -> list[dict]:
    """Ways to bring records to DALI, each into a pipeline that only reads the headers."""
    kinds = {"dtype": [types.UINT8, types.FLOAT], "ndim": [1, 1], "num_outputs": 2}
    ways = {
        "callback, batch": (BatchCallback, {"batch": True}),
        "parallel=True, batch": (BatchCallback, {"batch": True, "parallel": True, "prefetch_queue_depth": 4}),
        "parallel=True, sample": (SampleCallback, {"batch": False, "parallel": True, "prefetch_queue_depth": 2}),
    }
    rows = []
    for name, (source, options) in ways.items():
        pipeline = Pipeline(
            args.batch_size, 2, None, prefetch_queue_depth=3, py_num_workers=workers, py_start_method="spawn"
        )
        with pipeline:
            encoded, labels = fn.external_source(source(prefix, args.batch_size), **kinds, **options)
            pipeline.set_outputs(fn.peek_image_shape(encoded), labels)
        for work_ms in (0, args.work_ms):
            rows.append(measure(f"{name}, {work_ms:g} ms", pipeline.run, args.batch_size, args.steps, work_ms))
        del pipeline

    pipeline = Pipeline(args.batch_size, 2, None, prefetch_queue_depth=3)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
        labels = fn.external_source(name="labels", dtype=types.FLOAT, ndim=1)
        pipeline.set_outputs(fn.peek_image_shape(encoded), labels)
    fed, dataset = FedPipeline(pipeline, 3), open_dataset(prefix)
    numbers, ids, reader, in_flight = count(), Ids(dataset, args.batch_size), BatchReader(dataset), []

    def push() -> None:
        records = reader.read(ids(next(numbers)))
        in_flight.append(encoded_list(records.payloads))
        del in_flight[:-5]
        fed.push(encoded=in_flight[-1], labels=records.labels)

    def step() -> None:
        fed.pop()
        push()

    for _ in range(3):
        push()
    for work_ms in (0, args.work_ms):
        rows.append(measure(f"fed by hand (ours), {work_ms:g} ms", step, args.batch_size, args.steps, work_ms))
    return rows


def picture_size(text: str) -> tuple[int, int]:
    width, x, height = text.partition("x")
    if not (x and width.isdigit() and height.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give width x height, such as 500x375")
    return int(width), int(height)


def main() -> int:
    try:
        return run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="one RecordIO pair (prefix or .rec); default: made-up pictures")
    parser.add_argument("--records", type=int, default=16384, help="records to make up (default: %(default)s)")
    parser.add_argument(
        "--picture", type=picture_size, default="500x375", help="size of made-up pictures (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=100, help="batches per row (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="decoding threads")
    parser.add_argument("--prefetch", type=int, default=DecoderSettings.prefetch)
    parser.add_argument("--hw-decoder-load", type=float, default=DecoderSettings.hw_decoder_load)
    parser.add_argument("--memory-padding", type=float, default=DecoderSettings.memory_padding)
    parser.add_argument("--work-ms", type=float, default=15, help="Python work per batch (default: %(default)s)")
    parser.add_argument("--no-decoding", action="store_true", help="only the rows without decoding")
    parser.add_argument("--feeds", action="store_true", help="compare ways of feeding instead")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU; leave it out, or give cpu")

    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    settings = DecoderSettings(args.workers, args.prefetch, args.hw_decoder_load, args.memory_padding)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "made-up" if args.data is None else pair_paths(args.data)[0].with_suffix("")
        if args.data is None:
            width, height = args.picture
            make_pair(prefix, args.records, width, height)
        dataset = open_dataset(prefix)
        args.records = len(dataset)
        if args.feeds:
            rows = feed_rows(args, prefix, workers=args.workers)
        else:
            rows = loader_rows(args, dataset, device, settings)
            rows += [] if args.no_decoding else [mxnet_row(args, prefix, device, settings)]
        mean_kb = dataset.files[0].size_bytes / len(dataset) / 1024

    machine = torch.cuda.get_device_name(0) if device.type == "cuda" else "no GPU"
    print(
        f"{machine}, {args.workers} threads, batch {args.batch_size}, {args.image_size} px, {mean_kb:.0f} KB a record"
    )
    print(f"{'':54s}{'records/s':>12s}{'thread us/record':>18s}")
    for row in rows:
        print(f"{row['name']:54s}{row['records_per_s']:12,.0f}{row['thread_us_per_record']:18.1f}")
    if args.json:
        facts = {"machine": machine, "record_kb": mean_kb} | {k: str(v) for k, v in vars(args).items()}
        args.json.write_text(json.dumps({"settings": facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
