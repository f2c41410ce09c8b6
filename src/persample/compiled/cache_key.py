"""Cache key: everything a compiled step reads except tensor values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from persample import _torch
from persample.compiled.describe import Descriptions


class StepState:
    """The modules and functions of a step, as they are now.

    Args:
        modules: the model, and the loss if it is a module.
        functions: the other functions of the step.
        stand_ins: while a step is traced, other tensors stand for the parameters and buffers; `{id: position}` of the
            tensors that they stand for. `tensors` is empty then.

    Attributes:
        modules: all modules with their paths.
        tensors: the parameters and buffers of the modules, each once.
        key: descriptions of the tensors, of the modules with their classes, and of the functions, with all that their
            code can read: defaults, enclosed variables, globals, attributes of objects.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        functions: Sequence[Callable[..., Any]],
        stand_ins: Mapping[int, int] | None = None,
    ) -> None:
        self.modules = {m: name for root in modules for name, m in root.named_modules()}
        self.tensors: list[Tensor] = []
        self._positions: dict[int, int] = dict(stand_ins or {})  # of the tensors, by their ids
        self._members = [members for m in self.modules for members in (_torch.get_parameters(m), _torch.get_buffers(m))]
        for members in self._members if stand_ins is None else ():
            for tensor in members.values():
                if tensor is not None and id(tensor) not in self._positions:
                    self._positions[id(tensor)] = len(self.tensors)
                    self.tensors.append(tensor)
        descriptions = Descriptions(self._positions)
        self.key = (
            tuple([describe_tensor(t) for t in self.tensors]),
            tuple(map(descriptions.describe_module, self.modules)),
            tuple(map(descriptions.describe, functions)),
        )

    def is_changed(self, later: StepState) -> bool:
        """Whether the modules or functions have changed, apart from their tensors."""
        return self.key[1:] != later.key[1:]

    def find_change(self, later: StepState) -> str:
        """The first attribute that has changed, in words."""
        for i, (module, name) in enumerate(self.modules.items()):
            before, after = (dict(state.key[1][i]) for state in (self, later))
            for attribute in before.keys() | after.keys():
                if before.get(attribute) != after.get(attribute):
                    owner = f"module {name!r}" if name else type(module).__name__
                    return f"the class of {owner}" if attribute == "class" else f"'{attribute}' of {owner}"
        return "a variable that its functions enclose, or a global variable"

    @contextmanager
    def replace_tensors(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block, the modules have these parameters and buffers. Afterwards all attributes are restored."""
        attributes = [(vars(module), dict(vars(module))) for module in self.modules]
        members = [(now, dict(now)) for now in self._members]
        for now, before in members:
            now.update({name: t if t is None else tensors[self._positions[id(t)]] for name, t in before.items()})
        try:
            yield
        finally:
            for now, before in [*attributes, *members]:
                now.clear()
                now.update(before)


def describe_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor except its values; `requires_grad` comes last."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
