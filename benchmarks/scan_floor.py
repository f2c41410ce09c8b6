"""The arithmetic that a scan of the CNN of `benchmarks.scan` cannot do without, in bare calls of torch.

A pass without the gradients of weights, the cheapest products known for the norms of each layer, and the products of
the projections. There is no tracking, no loop in Python over layers, and nothing is stored, so that a scan cannot take
less time with these formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 32  # of the projections of the second convolution


def make_floors(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Callable[[], Any]]:
    """Functions that compute one batch: the pass alone, with all norms, and with all norms and projections."""
    layers: Any = model
    weights = [p.detach() for p in model.parameters()]
    inputs: list[Tensor] = []  # of the layers that have weights
    for layer in layers:
        if list(layer.parameters()):
            inputs.append(images)
        images = layer(images).detach()
    grads = [torch.randn_like(layers[i](x).detach()) for i, x in zip((0, 1, 4, 5, 9), inputs, strict=True)]
    filters = torch.randn(SIDE, *weights[4].shape[1:])
    points = torch.randn(SIDE, len(weights[4]), 1, 1)

    def run_pass() -> None:
        with torch.no_grad():  # no activation before the first convolution needs a gradient
            first = F.conv2d(inputs[0], weights[0], weights[1], padding=1)
        first.requires_grad_()
        out = F.max_pool2d(F.group_norm(first, 4, weights[2], weights[3]).relu(), 2)
        out = F.group_norm(F.conv2d(out, weights[4], weights[5], padding=1), 4, weights[6], weights[7]).relu()
        logits = F.linear(F.adaptive_avg_pool2d(out, 2).flatten(1), weights[8], weights[9])
        torch.autograd.grad(F.cross_entropy(logits, labels), first)

    def compute_norms() -> None:
        _compute_norms_of_rows(inputs[0], grads[0])
        compute_squares_of_pixels(inputs[2], grads[2])
        for i in (1, 3):  # group norms
            product = F.group_norm(inputs[i], 4).mul_(grads[i])
            torch.linalg.vector_norm(product.sum((2, 3)), dim=1), torch.linalg.vector_norm(grads[i].sum((2, 3)), dim=1)
        for i in (0, 2):  # biases
            torch.linalg.vector_norm(grads[i].sum((2, 3)), dim=1)
        torch.linalg.vector_norm(inputs[4], dim=1) * torch.linalg.vector_norm(grads[4], dim=1)

    def project() -> None:  # the first convolution and the biases have their rows already
        small_inputs, small_grads = F.conv2d(inputs[2], filters, padding=1), F.conv2d(grads[2], points)
        torch.bmm(small_grads.flatten(2), small_inputs.flatten(2).mT)

    def run_all(*parts: Callable[[], None]) -> None:
        for part in parts:
            part()

    return {
        "pass without weight gradients": run_pass,
        "norms": partial(run_all, run_pass, compute_norms),
        "norms, projection": partial(run_all, run_pass, compute_norms, project),
    }


def _compute_norms_of_rows(images: Tensor, grad: Tensor) -> Tensor:
    """Norms of the gradients of a 3 x 3 convolution of one channel, from the gradients themselves."""
    padded, (height, width) = F.pad(images, (1, 1, 1, 1)), images.shape[2:]
    batch, _, rows, columns = padded.stride()
    windows = padded.as_strided((len(images), 3, 3, height, width), (batch, rows, columns, rows, columns))
    products = torch.bmm(windows.reshape(len(images), 9, height * width), grad.flatten(2).mT)
    return torch.linalg.vector_norm(products.flatten(1), dim=1)


def compute_squares_of_pixels(images: Tensor, grad: Tensor) -> Tensor:
    """Squared norms of the gradients of a 3 x 3 convolution, from inner products of pixels."""
    (height, width), pixels = images.shape[2:], images.flatten(2)
    products = torch.bmm(pixels.mT, pixels).view(-1, height, width, height, width)
    for one, other in ((1, 3), (2, 4)):
        total = products.clone()
        for to, start in ((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None))):
            index = [[part if dim in (one, other) else slice(None) for dim in range(5)] for part in (to, start)]
            total[tuple(index[0])].add_(products[tuple(index[1])])
        products = total
    positions = grad.flatten(2)
    return (torch.bmm(positions.mT, positions) * products.view(len(images), height * width, -1)).sum((1, 2))
