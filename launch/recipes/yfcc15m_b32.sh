#!/usr/bin/env bash
# The published recipe: RWKV-CLIP-B/32 on YFCC15M, 8 GPUs x 512, 32 epochs, bf16.
# Published result: ImageNet zero-shot 44.3 %, average of 11 data sets 44.4 % (Gu et al., EMNLP 2024).
#
#   bash launch/recipes/yfcc15m_b32.sh DATA RUN [more flags of launch/train.py]
#   HOSTFILE=hosts bash launch/recipes/yfcc15m_b32.sh ...        several machines; lower --batch-size in proportion
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 DATA RUN [flags]" >&2; exit 2; }
data=$1 run=$2
shift 2
# All paths are as seen from where this is called.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
exec deepspeed ${HOSTFILE:+--hostfile "$HOSTFILE"} "$root/launch/train.py" \
    --model RWKV-CLIP-B-32 --drop-path-rate 0.3 \
    --train-data "$data" --output "$run" --resume auto \
    --deepspeed_config "$root/ds_configs/zero1_bf16.json" --batch-size 512 --grad-clip 1.0 \
    --epochs 32 --lr 1e-3 --beta1 0.9 --beta2 0.98 --weight-decay 0.2 --warmup 0.1 --lr-schedule cosine \
    --seed 1467 --shuffle-window 16384 --prefetch 3 "$@"
