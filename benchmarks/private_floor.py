"""The arithmetic of a private step of the MLP and of the CNN alone: `python -m benchmarks.private_floor [--rounds 40]`.

A pass without the gradients of weights, the norms of all samples, the weighted sums, the noise and the update of SGD,
by the formulas and libraries that persample uses, for one batch size. Nothing is tracked, verified or checked. So a
private step of persample cannot take less time than this. The ratio is to a plain training step.

Group norms could use the mean and deviation of the forward pass instead of normalising again. That loses digits if the
mean is large, and norms of samples must not be too small.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.private import Training
from benchmarks.scan_floor import compute_squares_of_pixels
from benchmarks.timing import compute_quartiles, compute_ratios, pause_collector, time_call, time_in_turns
from benchmarks.workloads import WORKLOADS, Workload, compute_loss
from persample.forward.kernels import choose_kernel
from persample.private.noise import Noise
from persample.terms.products import multiply

WARM_UP_ROUNDS = 5

compute_linear = choose_kernel(F.linear, {1})  # as in a recording: its weight needs no gradient


class Floor:
    """A sequence of layers with one batch: the inputs of its layers, and gradients of their outputs.

    The values of the gradients do not matter for the time, so they are random.
    """

    def __init__(self, workload: Workload) -> None:
        model, self.x, self.labels = workload.build()
        self.layers: Any = model.requires_grad_(False)
        self.parameters = [p.detach() for p in model.parameters()]
        self.noise = Noise()
        self.inputs: dict[int, Tensor] = {}  # of the layers that have weights
        self.grads: dict[int, Tensor] = {}
        x = self.x
        for i, layer in enumerate(self.layers):
            if list(layer.parameters()):
                self.inputs[i] = x
                self.grads[i] = torch.randn_like(layer(x))
            x = layer(x).detach()

    def run_step(self) -> None:
        """The arithmetic of one step."""
        self.run_pass()
        with torch.no_grad():
            measured = [self.measure(i, self.layers[i]) for i in self.inputs]
            squares = torch.stack([square for _, squares in measured for square in squares]).sum(0)
            weights = squares.rsqrt().clamp(max=1.0)
            sums = [total for compute_sums, _ in measured for total in compute_sums(weights)]
            self.noise.add_to(sums, 1.0)
            for parameter, total in zip(self.parameters, sums, strict=True):
                parameter.add_(total.view(parameter.shape), alpha=-1e-3)

    def run_pass(self) -> None:
        """Forward and backward, without the gradients of weights."""
        first = out = self.layers[0](self.x).requires_grad_()  # the input needs no gradient
        for layer in [*self.layers][1:]:
            is_linear = isinstance(layer, nn.Linear)
            out = compute_linear(out, layer.weight.detach(), layer.bias.detach()) if is_linear else layer(out)
        torch.autograd.grad(compute_loss(out, self.labels), first)

    def measure(self, i: int, layer: nn.Module) -> tuple[Callable[[Tensor], list[Tensor]], list[Tensor]]:
        """The weighted sums of a layer's weight and bias, as a function; and the squared norms of their rows."""
        x, grad = self.inputs[i], self.grads[i]
        if isinstance(layer, nn.Linear):
            square, of_input = (torch.linalg.vector_norm(t, dim=1).square() for t in (grad, x))
            return lambda w: _add_linear(x, grad, w), [square * of_input, square]
        bias = grad.sum((2, 3))
        if isinstance(layer, nn.GroupNorm):
            weight = F.group_norm(x, layer.num_groups).mul_(grad).sum((2, 3))
            return lambda w: [w @ weight, w @ bias], [weight.square().sum(1), bias.square().sum(1)]
        assert isinstance(layer, nn.Conv2d)
        if x.shape[-1] > 8:
            rows = _compute_rows(x, grad).flatten(1)
            squares = torch.linalg.vector_norm(rows, dim=1).square()
            return lambda w: [w @ rows, w @ bias], [squares, bias.square().sum(1)]
        squares = compute_squares_of_pixels(x, grad)
        return lambda w: [_convolve(x, grad * w[:, None, None, None]), w @ bias], [squares, bias.square().sum(1)]


def _add_linear(x: Tensor, grad: Tensor, weights: Tensor) -> list[Tensor]:
    weighted = grad * weights[:, None]
    return [multiply(weighted.mT, x), weighted.sum(0)]


def _compute_rows(x: Tensor, grad: Tensor) -> Tensor:
    """The gradients of a 3 x 3 convolution: the library's gradient, with the channels of each sample as groups."""
    return _convolve(x.flatten(0, 1)[None], grad.flatten(0, 1)[None], groups=len(x)).view(len(x), grad.shape[1], -1)


def _convolve(x: Tensor, grad: Tensor, groups: int = 1) -> Tensor:
    """The gradient of the weight of a 3 x 3 convolution."""
    weight = grad.new_empty(1).expand(grad.shape[1], x.shape[1] // groups, 3, 3)
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [False, True, False]
    )[1]


def measure_floor(workload: Workload, rounds: int) -> tuple[float, float, float]:
    """Quartiles of the time of the floor as a ratio to a plain training step."""
    plain, floor = Training(workload), Floor(workload)
    timers = {"plain": lambda: time_call(plain.train), "floor": lambda: time_call(floor.run_step)}
    with pause_collector():
        times = time_in_turns(timers, rounds, WARM_UP_ROUNDS)
    return compute_quartiles(compute_ratios(times["floor"], times["plain"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of timing (default: %(default)s)")
    rounds = parser.parse_args().rounds
    for workload in WORKLOADS:
        if workload.short in ("MLP", "CNN"):
            low, median, high = measure_floor(workload, rounds)
            print(f"{workload.name}: {median:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
