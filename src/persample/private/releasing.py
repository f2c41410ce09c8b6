"""The release of a step: the sums of all processes, with noise that the first process draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opacus.optimizers.optimizer import _generate_noise
from torch import Tensor, nn

from persample import _torch
from persample._internal.precision import widen
from persample.private.mechanism import CorrelatedMechanism
from persample.private.noise import Noise, add_noise_of
from persample.private.one_step import Sums
from persample.private.processes import Peers


class Releaser:
    """Adds up the sums of all processes, with noise.

    Sums and noise have at least 32 bits, whatever the dtype of the parameters, so that they are rounded once.

    Args:
        peers: the processes that train together.
        shards: the ids of parameters that FSDP2 has sharded.
        generator: generator of the noise in place of `noise`, as Opacus has it.
        secure_mode: whether the noise is drawn as in the `secure_mode` of Opacus.

    Attributes:
        noise: the source of the noise, unused with a generator.
        mechanism: that of correlated noise, if the noise is correlated.
    """

    def __init__(self, peers: Peers, shards: set[int], generator: torch.Generator | None, secure_mode: bool) -> None:
        self.peers, self.shards = peers, shards
        self.noise: Noise = Noise()
        self.mechanism: CorrelatedMechanism | None = None
        self._generator, self._secure_mode = generator, secure_mode

    @property
    def growth(self) -> float:
        """The deviation of the noise of the last step, relative to that of `release`."""
        return 1.0 if self.mechanism is None else self.mechanism.compute_growth()

    def release(self, params: Sequence[Tensor], sums: Sums, std: float) -> Sums:
        """The sums of all processes with noise of deviation `std`, for all parameters.

        A parameter that no sample used has no sum, but it needs noise as well. The sum of a sharded parameter
        covers all processes, but not the noise.
        """
        totals = {id(p): sums.pop(id(p)) if id(p) in sums else widen(torch.zeros_like(p)) for p in params}
        whole = {key: total.contiguous() for key, total in totals.items() if key not in self.shards}
        if not self.shards:
            self.draw(list(whole.values()), std)
            return self.peers.add_up(whole)
        for p in params:
            if id(p) in self.shards:
                totals[id(p)] = totals[id(p)] + self._draw_shard_noise(std, p)
            else:
                self.draw([whole[id(p)]], std)
        return {**totals, **self.peers.send_from_first(whole)}

    def draw(self, totals: list[Tensor], std: float) -> None:
        """Add noise to contiguous tensors, in place, if this is the first process."""
        if self.peers.rank or not std:
            self.noise.skip()
            return
        parts = [torch.view_as_real(total) if total.is_complex() else total for total in totals]
        if self._secure_mode:
            for part in parts:
                part += _generate_noise(std=std, reference=part, generator=self._generator, secure_mode=True)
        elif self._generator is None:
            self.noise.add_to(parts, std)
        else:
            for part in parts:
                add_noise_of(self._generator, part, std)

    def _draw_shard_noise(self, std: float, p: Tensor) -> Tensor:
        """Noise for the shard of a parameter; the first process draws it for the whole parameter."""
        from torch.distributed.tensor import distribute_tensor

        whole = widen(torch.zeros(p.shape, dtype=p.dtype, device=p.device))
        self.draw([whole], std)
        return distribute_tensor(whole, p.device_mesh, p.placements)  # type: ignore[attr-defined]


def find_shards(module: nn.Module, params: Sequence[Tensor]) -> set[int]:
    """The ids of the parameters that FSDP2 has sharded."""
    return {id(p) for p in params if hasattr(p, "full_tensor")} if _torch.get_fsdp_states(module) else set()
