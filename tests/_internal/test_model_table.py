"""The table of a model's modules and parameters is read again whenever the model has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from persample._internal.models import read_model

pytestmark = pytest.mark.quick


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.LayerNorm(3))
    model[1].tied = model[1][0]
    model.scale = nn.Parameter(torch.ones(3))
    return model


def move_child(model: nn.Module) -> None:
    """The last child of one module becomes the first child of the next one."""
    child = model[1]._modules.pop("tied")
    model[2]._modules["tied"] = child


def rename_child(model: nn.Module) -> None:
    modules = model._modules
    modules["other"] = modules.pop("1")


def replace_layer(model: nn.Module) -> None:
    model[1][0] = nn.Linear(3, 3)


def replace_parameter(model: nn.Module) -> None:
    model[1][0].weight = nn.Parameter(torch.zeros(3, 3))


def remove_parameter(model: nn.Module) -> None:
    model[1][0].bias = None


def add_parameter(model: nn.Module) -> None:
    model[0].bias = nn.Parameter(torch.zeros(3))


def tie_parameters(model: nn.Module) -> None:
    model[2].weight = model.scale


def add_layer(model: nn.Module) -> None:
    model.append(nn.Linear(3, 1))


CHANGES = [
    move_child, rename_child, replace_layer, replace_parameter, remove_parameter, add_parameter, tie_parameters,
    add_layer,
]  # fmt: skip


def assert_read(model: nn.Module) -> None:
    for _ in range(2):
        modules, parameters, _ = read_model(model)
        assert [*map(id, modules)] == [*map(id, model.modules())]
        expected = dict(model.named_parameters())
        assert [*parameters] == [*expected] and all(parameters[name] is expected[name] for name in expected)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_noticed(change: Callable[[nn.Module], None]) -> None:
    model = make_model()
    assert_read(model)
    change(model)
    assert_read(model)


def test_a_class_may_list_its_own_parameters() -> None:
    class Model(nn.Linear):
        def named_parameters(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            return [("mine", self.weight)]

    model = Model(2, 2)
    assert read_model(model)[1] == {"mine": model.weight}


def test_a_module_may_be_its_own_child() -> None:
    model = make_model()
    model[1].up = model
    assert_read(model)


def test_a_model_is_freed() -> None:
    model = make_model()
    read_model(model)
    freed = [weakref.ref(model), weakref.ref(model[1][0].weight)]
    gc.disable()
    try:
        del model
        assert [reference() for reference in freed] == [None, None]
    finally:
        gc.enable()
