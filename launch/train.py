"""Train RWKV-CLIP.

One machine, all GPUs:      deepspeed launch/train.py --model RWKV-CLIP-B-32 --train-data DATA --output RUN \
                                --deepspeed_config ds_configs/zero1_bf16.json
Several machines:           deepspeed --hostfile hosts launch/train.py ... --expect-world-size 16
With torchrun or SLURM:     torchrun --nproc-per-node 8 launch/train.py ...      srun python launch/train.py ...
One process, GPU or CPU:    python launch/train.py ... --batch-size 64
Go on after a stop:         the same command with --resume auto

Watch it with `tensorboard --logdir RUN`. SIGTERM, SIGUSR1 or Ctrl-C to any process: save, and stop. All flags: --help.
Exit status: 0 when the run is complete, 143, 138 or 130 when one of these signals stopped it, 1 or 2 after an error.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace

# PyTorch's warnings about a lost peer are pages of C++ frames; which peer and why is said here in a line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# CUDA spreads a process's streams over 8 queues of the GPU, unless it is told of more. A decoder's small kernels then
# stood in the training stream's queue behind a whole step: a tenth of the speed.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from rwkv_clip.errors import UserError, report
from rwkv_clip.training.arguments import parse_arguments
from rwkv_clip.training.distributed import CommonError, World, choose_device, meet, share_cores, start_collectives
from rwkv_clip.training.launcher import Place, check_launcher, find_place
from rwkv_clip.training.log import logger, start_log
from rwkv_clip.training.signals import Interrupted, StopRequest
from rwkv_clip.training.watchdog import Watchdog, announce_failure, announce_stop, failure_elsewhere, lost_peer

# Of the parsed arguments, those in which the ranks of one job differ.
OWN_ARGUMENTS = ("given", "local_rank")


def main() -> int:
    """The exit status: 0 for a complete run, 2 for a user's mistake, 1 for a failure, `StopRequest.exit_status`."""
    world: World | None = None
    stop = StopRequest()
    stop.install()
    try:
        with stop.interruptible():
            args, place = _read_place()
            device = choose_device(place)
            share_cores(place)
            job = repr(sorted((name, value) for name, value in vars(args).items() if name not in OWN_ARGUMENTS))
            world = meet(place, device, args.start_timeout, job)
            place.export()
            watchdog = Watchdog(world, stop)
            watchdog.start()
            start_collectives(world)

            from rwkv_clip.training.job import run_job  # after the device is chosen: it imports DALI and DeepSpeed

        completed = run_job(args, world, stop)
        world.wait()
        watchdog.stop()
        return 0 if completed else stop.exit_status
    except Interrupted:
        return _leave_start(world, stop)
    except UserError as error:
        if world is None or world.is_first or not isinstance(error, CommonError):
            report(error)
        if world is not None and not isinstance(error, CommonError):
            announce_failure(world, str(error))
        return 2
    except BaseException as error:
        if world is None and isinstance(error, SystemExit):
            return int(error.code or 0)  # --help
        if world is not None and stop.requested and not stop.training_began:
            return _leave_start(world, stop)  # a peer that was asked to stop broke off what this rank was doing
        cause = (failure_elsewhere(world) or lost_peer(world, error)) if world is not None else None
        at_once = isinstance(error, KeyboardInterrupt)  # raised by a second one alone
        if at_once:
            cause = "stopped at once by a second Ctrl-C; --resume auto goes on from the last complete save"
            report(UserError(cause))
        elif cause is None:
            logger.exception("rank %s failed", world.rank if world else os.environ.get("RANK", 0))
        elif world.is_first:
            report(UserError(cause))
        if world is not None:
            announce_failure(world, cause or f"{type(error).__name__}: {error}")
        return stop.exit_status if at_once else 1
    finally:
        if world is not None:
            world.leave()


def _read_place() -> tuple[Namespace, Place]:
    """The arguments, and which process this is, as the launcher says."""
    args = parse_arguments()
    place = find_place(args.local_rank)
    check_launcher(place)
    if args.expect_world_size not in (None, place.world_size):
        raise UserError(
            f"--expect-world-size is {args.expect_world_size} but {place.world_size} process(es) were started "
            f"({place.launcher}): check the hostfile and the launcher's settings"
        )
    start_log(place.rank == 0)
    return args, place


def _leave_start(world: World | None, stop: StopRequest) -> int:
    """Asked to stop before training began: tell the other ranks, and leave. The exit status."""
    line = f"stopped by {stop.reason} before training began: nothing to save"
    if world is None:
        print(line, flush=True)  # there may be no log yet
    else:
        announce_stop(world, stop)
        logger.info(line)
    return stop.exit_status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a failure, threads of DALI, NCCL and gloo may wait for peers that are gone.
    os._exit(status)
