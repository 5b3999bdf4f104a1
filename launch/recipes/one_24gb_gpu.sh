#!/usr/bin/env bash
# RWKV-CLIP-B/32 on one GPU with 24 GB: activation checkpointing, 128 pairs per forward pass, and 32 passes gathered
# into one global batch of 4,096 whose pairs are all negatives of each other.
#
#   bash launch/recipes/one_24gb_gpu.sh DATA RUN [more flags of launch/train.py]
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 DATA RUN [flags]" >&2; exit 2; }
data=$1 run=$2
shift 2
# All paths are as seen from where this is called.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
exec deepspeed --num_gpus 1 "$root/launch/train.py" \
    --model RWKV-CLIP-B-32 --train-data "$data" --output "$run" --resume auto \
    --deepspeed_config "$root/ds_configs/zero1_bf16_checkpointing.json" --batch-size 128 --gradient-accumulation 32 \
    --accumulation global --epochs 32 --lr 1e-3 "$@"
