"""WKV6 as a PyTorch custom op: opcheck, torch.compile, meta tensors, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from wkv6_inputs import NAMES, random_inputs, relative_error, results

from rwkv_clip.ops import wkv6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_passes(dtype, device):
    x = random_inputs((2, 5, 2, 8), dtype=dtype)
    leaves = tuple(x[name].to(device).requires_grad_() for name in NAMES)
    torch.library.opcheck(torch.ops.rwkv_clip.wkv6.default, leaves)
    detached = (*(leaf.detach() for leaf in leaves), x["gy"].to(device))
    torch.library.opcheck(torch.ops.rwkv_clip.wkv6_backward.default, detached)


class Mixing(nn.Module):
    """The shape of the model's use: projections, the op between them, a gate."""

    def __init__(self, heads: int, size: int):
        super().__init__()
        self.heads = heads
        self.project = nn.ModuleList(nn.Linear(heads * size, heads * size) for _ in range(5))
        self.u = nn.Parameter(torch.randn(heads, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        r, k, v, w = (layer(x).unflatten(-1, (self.heads, -1)) for layer in self.project[:4])
        return self.project[4](wkv6(r, k, v, w.float(), self.u).flatten(-2) * x)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_block_compiles_whole_and_gives_the_same_gradients(dynamic, device):
    torch.manual_seed(0)
    block = Mixing(heads=2, size=8).to(device)
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager_decomp_partition")
    for batch, tokens in ((2, 7), (3, 9)):
        x = torch.randn(batch, tokens, 16, device=device)
        wanted = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
        found = torch.autograd.grad(compiled(x).square().sum(), list(block.parameters()))
        for (name, _), a, b in zip(block.named_parameters(), found, wanted, strict=True):
            assert relative_error(a, b.cpu()) < 1e-5, name


def test_bad_input_is_an_error_inside_a_compiled_function_too():
    x = torch.zeros(1, 3, 1, 10)
    with pytest.raises(Exception, match="multiple of 4"):
        torch.compile(wkv6, fullgraph=True, backend="eager")(x, x, x, x, torch.zeros(1, 10))


def test_meta_tensors_give_shapes_and_dtypes():
    x = torch.empty(2, 9, 3, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    w = torch.empty(2, 9, 3, 16, device="meta", requires_grad=True)
    y = wkv6(x, x, x, w, torch.empty(3, 16, device="meta"))
    y.backward(torch.empty_like(y))
    assert (y.shape, y.dtype, x.grad.dtype, w.grad.dtype) == (x.shape, torch.bfloat16, torch.bfloat16, torch.float32)


def test_activation_checkpointing_gives_the_same_gradients(device):
    x = random_inputs((2, 9, 2, 8))

    def checkpointed(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(wkv6, *inputs, use_reentrant=False)

    plain, again = results(x, device), results(x, device, checkpointed)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_captures_both_passes():
    x = {name: value.cuda() for name, value in random_inputs((4, 49, 2, 80), dtype=torch.bfloat16).items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results(x, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(x, "cuda")
    x["r"].mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    wanted = results(x, "cuda")
    assert all(torch.equal(captured[name], wanted[name]) for name in wanted)
