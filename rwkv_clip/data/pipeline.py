"""DALI pipelines: encoded images in, pixels on the device out; and what makes them a model's input.

They are fed by hand (`fn.external_source` without a source): the loader decides what goes in and in which order, DALI
decodes, crops and resizes in its own threads. Encoded images are passed without a copy; DALI's threads read them
straight from the mapped files.

Feeding happens in the calling thread, because a thread beside a busy training thread would wait for the interpreter
lock again and again. What counts is what it costs there: 6 to 7 microseconds a record on a loaded 2-core machine,
where a callback of `fn.external_source` took 17 to 26 and one with `parallel=True` 12 to 27, workers not counted
(`benchmarks/loader.py --feeds`; 37 KB a record, batch 512).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UserError
from ..model.transform import MEAN, STD

try:
    from nvidia.dali import Pipeline, fn, types
    from nvidia.dali.tensors import TensorCPU, TensorListCPU
except ImportError as error:
    raise UserError(
        f"the data loader needs NVIDIA DALI, which cannot be imported ({error}): install nvidia-dali-cuda120 (CUDA 12 "
        f"driver, or no GPU) or nvidia-dali-cuda130 (CUDA 13 driver)"
    ) from error


@dataclass(frozen=True)
class DecoderSettings:
    """How much of the machine decoding may use; the defaults are the published loader's, unless stated.

    Figures are for 500 x 375 JPEGs, batch 512, on one H200 with 16 cores.
    """

    num_threads: int = 10
    """CPU threads per rank for decoding (and, without a GPU, resizing)."""
    prefetch: int = 3
    """Batches made ahead of the training step: evens out slow reads; each takes 150 KB of GPU memory a picture of 224
    pixels, and what the decoder's crop takes, three times that for JPEGs of 500 x 375."""
    hw_decoder_load: float = 1.0
    """Share of JPEGs for the GPU's JPEG engine, if it has one: 0.65, the published loader's, gave 29,900 img/s, 0.9
    30,100, 0 15,800. What the engine does not decode takes the time of training's own kernels and CPU threads."""
    memory_padding: float = 1.0
    """Share of the published loader's memory that is set aside, so that a large picture needs no allocation in mid-run:
    1 is 211 MB of GPU memory and twice 141 MB of page-locked memory per thread, 0 allocates when a picture needs it."""

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise UserError(f"{self.num_threads} loader threads are too few: give 1 or more")
        if self.prefetch < 1:
            raise UserError(f"a prefetch of {self.prefetch} batches is too small: give 1 or more")
        if self.memory_padding < 0:
            raise UserError(f"the decoder's memory padding {self.memory_padding} is a share: give 0 or more")
        if not 0 <= self.hw_decoder_load <= 1:
            raise UserError(f"the hardware decoder's load {self.hw_decoder_load} is a share: give 0 to 1")


# Bytes per decoding thread in the published loader.
_DEVICE_PADDING = 211_025_920
_HOST_PADDING = 140_544_512
# Threads that mostly wait for the disk; more hide more latency of network file systems.
_READING_THREADS = 8


def encoded_list(payloads: Sequence[memoryview | bytes]) -> TensorListCPU:
    """Encoded images as DALI tensors over the same memory; it must stay alive until the batch's output was taken."""
    return TensorListCPU([TensorCPU(payload) for payload in payloads], None, False)


class FedPipeline:
    """A DALI pipeline with its inputs pushed and its outputs popped, in order.

    An output whose batch failed raises DALI's RuntimeError when it is popped, after the good batches before it.

    Args:
        pipeline: defined, with `depth` as its prefetch depth.
        depth: batches in flight.
    """

    def __init__(self, pipeline: Pipeline, depth: int):
        pipeline.build()
        self._pipeline: Pipeline | None = pipeline
        self._missing = depth
        self._last: dict = {}

    def push(self, **inputs: np.ndarray | TensorListCPU) -> None:
        """Feed one batch: input name -> array [batch, ...] or tensors, which stay untouched until the output."""
        for name, data in inputs.items():
            # Wrapped here, an array is spared DALI's questions about what it might be.
            data = TensorListCPU(data) if isinstance(data, np.ndarray) else data
            self._pipeline.feed_input(name, data)
        # DALI starts by taking as many batches at once as it keeps in flight.
        self._missing -= 1
        if self._missing <= 0:
            self._pipeline.schedule_run()
        self._last = inputs

    def pop(self, convert: Callable = torch.from_dlpack) -> list:
        """Wait for the oldest batch; its outputs, owned by the caller.

        They are tensors without a copy, or what `convert` makes of DALI's.

        If too few batches were pushed for a start, the last one fills up, and there is nothing to push any more.
        """
        while self._missing > 0:
            self.push(**self._last)
        outputs = self._pipeline.share_outputs()
        # DALI reuses the memory after the work that the device's current stream holds when the tensor is dropped.
        tensors = [convert(output.as_tensor()) for output in outputs]
        self._pipeline.release_outputs()
        return tensors

    def close(self) -> None:
        """End DALI's threads and free its memory; outputs taken before stay valid."""
        self._pipeline = None
        self._last = {}


def shape_pipeline(batch_size: int, depth: int) -> FedPipeline:
    """encoded -> shapes int64 [batch, 3] (height, width, channels) of the upright pictures, from their headers; and a
    byte of each, which nobody needs.

    This is also what brings the coming records into memory: whoever reads a byte of a mapped file waits until the
    system has read 64 KB or so on either side of it, and here DALI's threads do that for the start and the middle of
    each record, so that decoding need not wait. Threads of Python could do the same, but fought with the training
    thread for the interpreter's lock.
    """
    pipeline = Pipeline(batch_size, num_threads=_READING_THREADS, device_id=None, prefetch_queue_depth=depth)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
        middle = fn.slice(encoded, rel_start=0.5, shape=1, axes=[0], out_of_bounds_policy="trim_to_shape")
        pipeline.set_outputs(fn.peek_image_shape(encoded), middle)
    return FedPipeline(pipeline, depth)


class Normalise:
    """pixels uint8 [B, 3, S, S] -> (pixels / 255 - mean) / deviation, computed in float32, given in `dtype`.

    The result shares no memory with the pixels.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        deviation = torch.tensor(STD, dtype=torch.float64)[:, None, None]
        mean = torch.tensor(MEAN, dtype=torch.float64)[:, None, None]
        self._factor = (1 / (255 * deviation)).to(device, torch.float32)
        self._offset = (-mean / deviation).to(device, torch.float32)
        self._dtype = dtype

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        out = torch.empty(pixels.shape, dtype=self._dtype, device=pixels.device)
        return torch.addcmul(self._offset, pixels, self._factor, out=out)  # one kernel, whatever the types


def train_pipeline(batch_size: int, image_size: int, device: torch.device, settings: DecoderSettings) -> FedPipeline:
    """encoded, choices, labels -> pixels uint8 [batch, 3, size, size], labels float32.

    `choices` int32 [batch, 5]: top and left of the crop, its height and width, and whether it is flipped.

    The crop is decoded alone where the format allows it, stretched to the square with linear interpolation, and
    flipped where `flip` is 1.
    """
    pipeline = _pipeline(batch_size, device, settings)
    with pipeline:
        # One array, because each input costs the feeding thread time.
        choices = fn.external_source(name="choices", dtype=types.INT32, ndim=1)
        images = fn.decoders.image_slice(
            fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True),
            choices[0:2],
            choices[2:4],
            axes=[0, 1],
            **decoder_arguments(device, settings),
        )
        images = fn.resize(images, size=(image_size, image_size), interp_type=types.INTERP_LINEAR)
        pipeline.set_outputs(_planes(images, mirror=choices[4]), _labels(device))
    return FedPipeline(pipeline, settings.prefetch)


def eval_pipeline(batch_size: int, image_size: int, device: torch.device, settings: DecoderSettings) -> FedPipeline:
    """encoded, region_start, region_end, labels -> pixels uint8 [batch, 3, size, size], labels float32.

    The region (float32 y and x in source pixels, see `eval_regions`) becomes the square with cubic interpolation:
    the same as resizing the shorter side and cutting out the centre, without making what is cut off.
    """
    pipeline = _pipeline(batch_size, device, settings)
    arguments = decoder_arguments(device, settings)
    if device.type == "cuda":
        # Like the CPU's decoders and PIL's, so that scores do not depend on where a picture was decoded.
        arguments["jpeg_fancy_upsampling"] = True
        # A validation pass lives beside the training pipeline, and briefly.
        del arguments["device_memory_padding"], arguments["host_memory_padding"]
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
        images = fn.resize(
            fn.decoders.image(encoded, **arguments),
            size=(image_size, image_size),
            roi_start=fn.external_source(name="region_start", dtype=types.FLOAT, ndim=1),
            roi_end=fn.external_source(name="region_end", dtype=types.FLOAT, ndim=1),
            interp_type=types.INTERP_CUBIC,
        )
        pipeline.set_outputs(_planes(images), _labels(device))
    return FedPipeline(pipeline, settings.prefetch)


def eval_regions(image_shapes: np.ndarray, image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of each picture that the published evaluation shows, in source pixels.

    The shorter side is resized to `image_size`, the longer one to a whole number of pixels rounded down, and the
    middle square is cut out at a whole pixel.

    Args:
        image_shapes: heights and widths, [n, 2].

    Returns:
        start, end: float32 [n, 2], y and x.
    """
    shapes = np.asarray(image_shapes, np.int64)
    resized = image_size * shapes // shapes.min(1, keepdims=True)
    # np.rint rounds halves to even, as Python's round does in the published code's library.
    corner = np.rint((resized - image_size) / 2.0)
    scale = shapes / resized
    return (corner * scale).astype(np.float32), ((corner + image_size) * scale).astype(np.float32)


def _pipeline(batch_size: int, device: torch.device, settings: DecoderSettings) -> Pipeline:
    device_id = None
    if device.type == "cuda":
        device_id = torch.cuda.current_device() if device.index is None else device.index
    return Pipeline(
        batch_size, num_threads=settings.num_threads, device_id=device_id, prefetch_queue_depth=settings.prefetch
    )


def decoder_arguments(device: torch.device, settings: DecoderSettings) -> dict:
    """What DALI's image decoders are told on this device."""
    if device.type == "cpu":
        return {"device": "cpu", "output_type": types.RGB}
    return {
        "device": "mixed",
        "output_type": types.RGB,
        "hw_decoder_load": settings.hw_decoder_load,
        "device_memory_padding": round(settings.memory_padding * _DEVICE_PADDING),
        "host_memory_padding": round(settings.memory_padding * _HOST_PADDING),
    }


def _planes(images, mirror=0):
    """A plane per colour, not normalised: batches that wait for their step take a quarter of the memory so."""
    return fn.crop_mirror_normalize(images, dtype=types.UINT8, output_layout="CHW", mirror=mirror)


def _labels(device: torch.device):
    labels = fn.external_source(name="labels", dtype=types.FLOAT, ndim=1)
    return labels.gpu() if device.type == "cuda" else labels
