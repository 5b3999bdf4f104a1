#!/usr/bin/env bash
# From an empty checkout to a trained and scored model: install, prepare real pairs, pack them, train RWKV-CLIP-Nano
# under the deepspeed launcher, evaluate on pictures that training never saw. A second run skips what is done.
#
#   OUT   where data and run go (default: ./quickstart)
#   SEED  seed of weights and data order (default: 1467)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${OUT:-quickstart}
seed=${SEED:-1467}
run=$out/run-$seed

bash launch/install.sh
export PATH="$PWD/.venv/bin:$PATH"
mkdir -p "$out"

# 1. Pairs: pictograms of seven artists; without npm or the network, rendered shapes.
data=pictograms
# The pictogram sets that are large enough to tell something after so short a training.
sets=(--set unseen_artist_kind --set unseen_artist)
if [ -e "$out/shapes/stats.json" ] && [ ! -e "$out/pictograms/stats.json" ]; then
    data=shapes sets=()
elif ! rwkv-clip prepare pictograms "$out/pictograms"; then
    echo "quickstart: the pictograms cannot be had here (see above); taking rendered shapes instead"
    data=shapes sets=()
    rwkv-clip prepare shapes "$out/shapes"
fi

# 2. Shards.
rwkv-clip pack "$out/$data/train.tsv" "$out/$data-packed"

# 3. Training, on one GPU if there is one. On a CPU one process with one thread per core, up to 8: on cores that other
#    programs use as well, that is many times as fast as one process whose threads wait for each other in every operation.
config=$(python launch/choose_config.py)
ranks=1
if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    cores=$(nproc)
    while [ $((ranks * 2)) -le "$cores" ] && [ "$ranks" -lt 8 ]; do ranks=$((ranks * 2)); done
    export OMP_NUM_THREADS=1
fi
#    The small batch gives so short a run more steps; the longest caption, which names kind and colour, is taken most.
if [ -e "$run/weights.pt" ]; then
    echo "quickstart: $run is trained already"
else
    deepspeed --num_gpus "$ranks" launch/train.py \
        --model RWKV-CLIP-Nano --train-data "$out/$data-packed" --output "$run" --resume auto \
        --deepspeed_config "$config" --global-batch 128 --gradient-accumulation 1 --epochs 5 --lr 3e-3 --seed "$seed" \
        --caption-weights raw=1,synthetic=1,generated=10
fi
unset OMP_NUM_THREADS

# 4. Scores, each beside chance.
rwkv-clip evaluate "$run" --data "$out/$data" "${sets[@]}" --json "$run/scores.json"
echo
echo "watch the curves:  $PWD/.venv/bin/tensorboard --logdir $out"
