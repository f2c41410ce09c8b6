"""Adam for private gradients: the second moment of the gradient without that of the noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from persample.private.errors import PrivateTrainingError


class AdamBC(Optimizer):
    """DP-AdamBC (Tang, Shpilevskiy and Lecuyer, 2024, https://arxiv.org/abs/2312.14334). Wrap it by `make_private`.

    The noise of private training adds its variance to each squared gradient. With much noise, Adam's second moment is
    that variance alone, so that all coordinates have the same step: Adam becomes SGD with momentum. Here the moment of
    the noise, which is known, is subtracted. It costs no privacy.

    Args:
        params: parameters, as for `torch.optim.Adam`.
        lr: learning rate.
        betas: decay of the moments.
        floor: lower bound of the second moment of the gradient. Its root is the scale below which gradients are taken
            for noise.

    Attributes:
        noise_deviation: standard deviation of the noise in each coordinate of `p.grad`; a private optimizer sets it in
            each step.

    >>> p = torch.nn.Parameter(torch.zeros(3))
    >>> optimizer = AdamBC([p], lr=0.1, floor=1e-4)
    >>> p.grad, optimizer.noise_deviation = torch.tensor([0.5, -0.3, 0.3]), 0.3
    >>> optimizer.step()
    >>> [round(x, 3) for x in p.tolist()]
    [-0.125, 3.0, -3.0]
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), floor: float = 1e-7
    ) -> None:
        if lr < 0 or floor <= 0 or not all(0 <= beta < 1 for beta in betas):
            raise PrivateTrainingError(
                f"AdamBC needs lr >= 0, floor > 0 and betas in [0, 1), got lr={lr}, floor={floor}, betas={betas}."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor})
        self.noise_deviation: float | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of Adam with the corrected second moment."""
        if self.noise_deviation is None:
            raise PrivateTrainingError(
                "AdamBC does not know the noise of the gradients: pass it to make_private of persample, which tells it."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        (b1, b2), state, grad = group["betas"], self.state[p], p.grad
        assert grad is not None and self.noise_deviation is not None
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p), noise_sq=0.0)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        state["noise_sq"] = b2 * state["noise_sq"] + (1 - b2) * self.noise_deviation**2
        moment = (state["exp_avg_sq"] - state["noise_sq"]) / (1 - b2 ** state["step"])
        scale = group["lr"] / (1 - b1 ** state["step"])
        p.addcdiv_(state["exp_avg"], moment.clamp_(min=group["floor"]).sqrt_(), value=-scale)


def tell_noise(optimizer: Optimizer, deviation: float) -> None:
    """Tell an optimizer that uses it the deviation of the noise in `p.grad`."""
    if isinstance(optimizer, AdamBC):
        optimizer.noise_deviation = deviation
