"""A two-tower model of a few hundred parameters with the parts that training treats specially, and engines for it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, TOKENS, VOCABULARY, PIXELS = 12, 6, 20, 8


class TinyTowers(nn.Module):
    """Dropout in both towers, a precise `time_decay`, norms, biases and a bounded temperature; perhaps a logit bias."""

    def __init__(self, dropout: float = 0.0, with_logit_bias: bool = False):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor([math.log(1 / 0.07)]))
        self.image_model = nn.Sequential(nn.Linear(3 * PIXELS * PIXELS, WIDTH), nn.LayerNorm(WIDTH))
        self.text_model = nn.ModuleDict(
            {"emb": nn.Embedding(VOCABULARY, WIDTH), "ln": nn.LayerNorm(WIDTH), "out": nn.Linear(WIDTH, WIDTH)}
        )
        self.time_decay = nn.Parameter(torch.linspace(-6, -1, WIDTH).view(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, WIDTH) / 10)
        self.dropout = dropout
        self.logit_bias = nn.Parameter(torch.tensor([-10.0])) if with_logit_bias else None
        self.precise_names = ["logit_scale", "time_decay"] + ["logit_bias"] * with_logit_bias
        for name in self.precise_names:
            parameter = getattr(self, name)
            self.register_buffer(f"{name}_precise", parameter.detach().clone(), persistent=False)

    def precise_parameters(self):
        return {name: (getattr(self, name), getattr(self, f"{name}_precise")) for name in self.precise_names}

    def _precise(self, name):
        parameter, buffer = self.precise_parameters()[name]
        return parameter if parameter.dtype == torch.float32 else buffer + (parameter - parameter.detach())

    def forward(self, images, tokens):
        dtype = self.image_model[0].weight.dtype
        image = self.image_model(F.dropout(images.flatten(1).to(dtype), self.dropout, self.training)) + self.pos_embed
        mixed = self.text_model["emb"](tokens).float() * torch.exp(-torch.exp(self._precise("time_decay")))
        text = F.dropout(self.text_model["ln"](mixed.to(dtype)).mean(1), self.dropout, self.training)
        text = self.text_model["out"](text)
        image, text = F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1)
        scale = self._precise("logit_scale").float().exp()
        return (image, text, scale) if self.logit_bias is None else (image, text, scale, self._precise("logit_bias"))


def make_model(seed: int = 0, dropout: float = 0.0, with_logit_bias: bool = False) -> TinyTowers:
    torch.manual_seed(seed)
    return TinyTowers(dropout, with_logit_bias)


def make_pairs(count: int, seed: int = 1) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        images=torch.randn(count, 3, PIXELS, PIXELS, generator=generator),
        tokens=torch.randint(VOCABULARY, (count, TOKENS), generator=generator),
    )


def slice_pairs(pairs, start: int, stop: int) -> SimpleNamespace:
    return SimpleNamespace(images=pairs.images[start:stop], tokens=pairs.tokens[start:stop])


def micro_batches(pairs, rank: int, world_size: int, accumulation: int) -> list[SimpleNamespace]:
    """This rank's micro batches of a global batch, each rank with a slice of its own."""
    per_rank = len(pairs.images) // world_size
    size = per_rank // accumulation
    return [
        slice_pairs(pairs, rank * per_rank + step * size, rank * per_rank + (step + 1) * size)
        for step in range(accumulation)
    ]


def make_engine(model, micro_batch: int, accumulation: int = 1, stage: int = 1, precision: str = "fp32", **options):
    """A DeepSpeed engine over the model with the product's optimizer; `options`: lr, schedule and JSON keys."""
    import deepspeed

    from rwkv_clip.training.optimizer import build_optimizer

    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100000, "allgather_bucket_size": 100000},
        "gradient_clipping": 0.0,  # DeepSpeed's own default is 1.0
        "steps_per_print": 1000000,
    }
    if stage == 3:  # the temperature and most vectors whole on each rank, the others divided, in several sub-groups
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": WIDTH, "sub_group_size": 100}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    lr = options.pop("lr", 1e-2)
    factor = options.pop("schedule", None)
    optimizer = build_optimizer(model, lr=lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor) if factor else None
    config.update(options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine
