"""The training job: engine, loop, loss, optimizer, checkpoints, metrics."""
