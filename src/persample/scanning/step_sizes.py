"""The step sizes of Adam for each entry of the parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from persample.scanning.errors import ScanError

Adam = Optimizer | Mapping[str, Tensor]


def get_step_sizes(adam: Adam, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`1 / (sqrt(v) + eps)` for each parameter, by name: Adam's step for a gradient, without its learning rate.

    `adam` is an optimizer with the state of Adam, or `v` itself by the name of the parameter (eps is then 1e-8).
    """
    if not isinstance(adam, Optimizer):
        if missing := [name for name in parameters if name not in adam]:
            raise ScanError(f"adam has no second moment for the parameter '{missing[0]}'.")
        return {name: 1 / (adam[name].to(p).sqrt() + 1e-8) for name, p in parameters.items()}
    options = {id(p): group for group in adam.param_groups for p in group["params"]}
    factors = {}
    for name, p in parameters.items():
        state = adam.state.get(p, {})
        if "exp_avg_sq" not in state or "betas" not in options[id(p)]:
            raise ScanError(
                f"The optimizer has no second moment for the parameter '{name}'. Pass the Adam optimizer that trained "
                "this model, or a dict of second moments by parameter name."
            )
        beta, step = options[id(p)]["betas"][1], float(state["step"])
        second_moment = state["exp_avg_sq"] / (1 - beta**step)
        factors[name] = 1 / (second_moment.sqrt() + options[id(p)]["eps"])
    return factors
