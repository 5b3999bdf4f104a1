#!/usr/bin/env bash
# Fine-tune published or own weights on a small data set: a low constant rate after a short warm-up, little weight
# decay, the text tower kept as it is. Leave out --lock-text when the captions differ much from web text.
#
#   bash launch/recipes/finetune.sh WEIGHTS DATA RUN [more flags of launch/train.py]
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 WEIGHTS DATA RUN [flags]" >&2; exit 2; }
weights=$1 data=$2 run=$3
shift 3
# All paths are as seen from where this is called.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
exec deepspeed --num_gpus 1 "$root/launch/train.py" \
    --model RWKV-CLIP-B-32 --pretrained "$weights" --lock-text \
    --train-data "$data" --output "$run" --resume auto \
    --deepspeed_config "$root/ds_configs/zero1_bf16.json" --batch-size 256 \
    --epochs 5 --lr 1e-5 --weight-decay 0.05 --warmup 100 --lr-schedule constant "$@"
