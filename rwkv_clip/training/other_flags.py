"""Flags of other trainers that people type from habit, and what stands for them here."""

_CHECKPOINTING = "put an 'activation_checkpointing' section in the DeepSpeed JSON"
_TABLE = "pack the table first: `rwkv-clip pack TABLE DATA`, which has such flags, then --train-data DATA"
_NO_BATCH_NORM = "the model has no batch norm"
_STATIC_GRAPH = "it belongs to DistributedDataParallel, which DeepSpeed replaces"
_LAUNCH = "launch with deepspeed, torchrun or srun"
_MODEL = "use --model with a JSON file"
_OUTPUT = "use --output FOLDER, which holds the log, the metrics and the checkpoints of the run"
_EVALUATION = "use --eval-every, in optimizer steps (without it, each epoch ends with an evaluation)"
_ZERO_SHOT = "use --eval-data with a folder that holds zs_NAME.json (classes, templates) and zs_NAME.tsv (image, label)"

# Of the published trainer and of DeepSpeed scripts.
_PUBLISHED = {
    "--gradient-acc": "use --gradient-accumulation, or gradient_accumulation_steps in the DeepSpeed JSON",
    "--open-checkpoint": _CHECKPOINTING,
    "--lr-scheduler": "use --lr-schedule",
    "--local-loss": "each rank always works on its own rows of the global loss; for local negatives use "
    "--negatives local",
    "--gather-with-grad": "the gradient of the gathered features is always exact",
    "--horovod": _LAUNCH,
    "--optimizer": "the optimizer is AdamW; another one goes into the 'optimizer' section of the DeepSpeed JSON",
    "--is-normlize": "features are always normalised",
    "--drop-path": "use --drop-path-rate",
    "--cfg": _MODEL,
    "--opts": _MODEL,
    "--bucket-cap-mb": "set zero_optimization.reduce_bucket_size in the DeepSpeed JSON, for ZeRO stage 2",
    "--static-graph": _STATIC_GRAPH,
    "--find-unused-parameters": "it belongs to DistributedDataParallel; every parameter is used",
    "--sync-bn": _NO_BATCH_NORM,
}
# Of open_clip.
_OPEN_CLIP = {
    "--wd": "use --weight-decay",
    "--logs": _OUTPUT,
    "--name": _OUTPUT,
    "--siglip": "use --loss siglip",
    "--val-frequency": _EVALUATION,
    "--zeroshot-frequency": _EVALUATION,
    "--save-frequency": "use --save-every, in optimizer steps (without it, each epoch ends with a save)",
    "--delete-previous-checkpoint": "use --keep-last 1",
    "--log-every-n-steps": "use --log-every",
    "--accum-freq": "use --gradient-accumulation, or gradient_accumulation_steps in the DeepSpeed JSON",
    "--grad-clip-norm": "use --grad-clip, or gradient_clipping in the DeepSpeed JSON",
    "--grad-checkpointing": _CHECKPOINTING,
    "--torchcompile": "put a 'compile' section in the DeepSpeed JSON, as in ds_configs/zero1_bf16_compile.json",
    "--skip-scheduler": "use --lr-schedule constant",
    "--imagenet-val": _ZERO_SHOT,
    "--imagenet-v2": _ZERO_SHOT,
    "--dataset-type": "nothing is needed: `rwkv-clip pack` reads tables, folders, .parquet files and WebDataset tars, "
    "and --train-data takes what it made",
    "--csv-img-key": _TABLE,
    "--csv-caption-key": _TABLE,
    "--csv-separator": _TABLE,
    "--report-to": "TensorBoard's files are always written; for Weights & Biases put a 'wandb' section in the "
    "DeepSpeed JSON",
    "--lock-image-unlocked-groups": "--lock-image keeps the whole tower; for a small rate use --image-lr-factor",
    "--lock-text-unlocked-layers": "--lock-text keeps the whole tower; for a small rate use --text-lr-factor",
    "--force-image-size": _MODEL,
    "--dist-url": _LAUNCH,
    "--dist-backend": _LAUNCH,
    "--ddp-static-graph": _STATIC_GRAPH,
    "--use-bn-sync": _NO_BATCH_NORM,
}
OTHER_FLAGS = _PUBLISHED | _OPEN_CLIP
