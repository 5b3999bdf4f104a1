"""Processes that are forks of one that has the slow packages loaded and has started no threads: they start at once.

There is one such server in a process of tests, whatever asks for it first; it starts with the environment of then.
"""

from __future__ import annotations

import multiprocessing
import os

context = multiprocessing.get_context("forkserver")
# The last one brings torch's compiler, which every engine imports.
context.set_forkserver_preload(
    ["torch", "deepspeed", "rwkv_clip.training.job", "deepspeed.runtime.zero.muon.muon_optimizer"]
)
for _name, _value in {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DS_LOG_LEVEL": "warning"}.items():
    os.environ.setdefault(_name, _value)
