"""torch.compile traces through a whole block, forward and backward, without a break."""

from __future__ import annotations

import pytest
import torch
from small_models import small_batch, small_model


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_block_compiles_as_one_graph_with_the_same_output_and_gradients(tower: str) -> None:
    model = small_model()
    images, tokens = small_batch(model)
    block = model.image_model.layers[0] if tower == "image" else model.text_model.blocks[0]
    x = torch.randn(3, 16 if tower == "image" else 12, 32)
    arguments = ((4, 4),) if tower == "image" else ()
    # aot_eager traces both passes without needing a compiler of kernels.
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = []
    for function in (block, compiled):
        block.zero_grad()
        inputs = x.clone().requires_grad_()
        output = function(inputs, *arguments)
        output.square().sum().backward()
        results.append((output, inputs.grad, *[parameter.grad.clone() for parameter in block.parameters()]))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-5)


def test_both_towers_compile_as_one_graph() -> None:
    model = small_model(image=dict(depth=1), text=dict(depth=1)).eval()
    images, tokens = small_batch(model)
    for function, argument in ((model.encode_image, images), (model.encode_text, tokens)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(argument), function(argument))
