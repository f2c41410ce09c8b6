"""How the public names behave: lengths, rows, attributes before there is an answer, missing extras, documentation."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import persample
import persample.private
import persample.testing
from persample import PerSampleError
from persample.testing.oracle import compute_test_loss
from tests.support import typed_usage
from tests.support.case import Case
from tests.support.cases import STREAMED_CASES
from tests.support.modules import make_mlp


def make_model() -> nn.Module:
    return make_mlp(3, 4, 2, dtype=torch.float32)


def record_small(**options: Any) -> Any:
    model = make_model()
    with persample.record(model, **options) as grads:
        model(torch.randn(5, 3)).square().mean().backward()
    return grads


@pytest.mark.parametrize("case", STREAMED_CASES, ids=str)
def test_a_row_is_a_row_of_the_dense_gradients(case: Case) -> None:
    module, args, kwargs = case.build()
    with persample.record(module, **case.record_options) as grads:
        compute_test_loss(module(*args, **kwargs), case.out_dim).backward()
    dense = grads.dense()
    for sample in (0, len(grads) - 1, -1):
        row = grads[sample]
        assert row.keys() == dense.keys()
        for name, part in row.items():
            torch.testing.assert_close(part, dense[name][sample])


def test_a_row_does_not_depend_on_samples_that_are_not_finite() -> None:
    model, x = make_model(), torch.randn(3, 3)
    x[1] = torch.inf
    with persample.record(model, nonfinite="keep", verify=False) as grads:
        model(x).square().sum().backward()
    assert all(part.isfinite().all() for part in grads[0].values())
    assert not all(part.isfinite().all() for part in grads[1].values())


@pytest.mark.parametrize("keep", ["norms", "everything"])
@pytest.mark.parametrize("per_parameter", [True, False])
def test_norm_that_float32_cannot_hold(keep: Any, per_parameter: bool) -> None:
    """The norm of such a sample is settled in float64, and infinite."""
    model, x = nn.Linear(6, 3), torch.randn(4, 6)
    x[2] *= 1e30
    with persample.record(model, keep=keep, nonfinite="keep") as grads:
        (model(x) * 1e9).sum().backward()
    norms = grads.norms(per_parameter=True)["weight"] if per_parameter else grads.norms()
    assert norms.isinf().tolist() == [False, False, True, False]


def test_rows_can_be_counted_and_iterated() -> None:
    grads = record_small()
    assert len(grads) == 5 and len(list(grads)) == 5
    for outside in (5, -6):
        with pytest.raises(IndexError, match=r"Row -?[56] of a recording with 5 rows"):
            grads[outside]
    with pytest.raises(TypeError):
        grads["0.weight"]


@pytest.mark.parametrize("options", [{}, {"keep": "norms"}, {"keep": "clip", "max_norm": 1.0}], ids=str)
def test_attributes_never_raise_for_hasattr(options: dict[str, Any]) -> None:
    """Neither before the forward pass nor after backward."""
    model = make_model()
    with persample.record(model, **options) as grads:
        assert grads and len(grads) == 0 and not hasattr(grads, "batch_size")
        for name in dir(persample.PerSampleGradients):
            hasattr(grads, name)
        with pytest.raises(PerSampleError, match="No forward pass has been recorded yet"):
            grads.batch_size  # noqa: B018
        out = model(torch.randn(5, 3))
        with pytest.raises(PerSampleError, match="No backward pass has been recorded yet"):
            grads.nonfinite_count  # noqa: B018
        out.square().mean().backward()
    assert len(grads) == grads.batch_size == 5 and grads.nonfinite_count == 0
    for name in dir(persample.PerSampleGradients):
        hasattr(grads, name)


def test_streamed_recordings_have_no_rows() -> None:
    with pytest.raises(PerSampleError, match=r"kept norms only, and no rows. Record with keep='everything'"):
        record_small(keep="norms")[0]


@pytest.mark.parametrize("options", [{"keep": "norms"}, {"keep": "clip", "max_norm": 0.1}, {"parameters": ["0.bias"]}])
def test_watch_takes_the_options_of_record(options: dict[str, Any]) -> None:
    assert (
        set(inspect.signature(persample.record).parameters) - set(inspect.signature(persample.watch).parameters)
        == set()
    )
    model, by_keyword, by_mapping = make_model(), [], []
    x = torch.randn(5, 3)
    with persample.watch(model, by_keyword.append, **options):
        model(x).square().mean().backward()
    with persample.watch(model, by_mapping.append, options):
        model(x).square().mean().backward()
    assert type(by_keyword[0]) is type(by_mapping[0]) and by_keyword[0].names == by_mapping[0].names
    torch.testing.assert_close(by_keyword[0].norms(), by_mapping[0].norms())


def test_watch_refuses_keywords_beside_options() -> None:
    with pytest.raises(PerSampleError, match="got options and the keywords keep"):
        persample.watch(make_model(), print, {"keep": "norms"}, keep="norms")
    with pytest.raises(PerSampleError, match="keep must be"):
        persample.watch(make_model(), print, keep="nothing")  # type: ignore[arg-type]


def test_public_names_are_listed_and_exist() -> None:
    assert set(persample.__all__) <= set(dir(persample))
    assert all(hasattr(persample, name) for name in persample.__all__)
    assert not hasattr(persample, "no_such_name")


PUBLIC = [
    (module, name)
    for module in (persample, persample.private, persample.testing)
    for name in module.__all__
    if name != "__version__"
]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[f"{module.__name__}.{name}" for module, name in PUBLIC])
def test_public_names_have_an_example_in_their_help(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    documentation = inspect.getdoc(value) or ""
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    assert documentation if is_error else ">>> " in documentation


def test_names_of_a_missing_extra_say_so_when_they_are_used() -> None:
    code = """
import sys
sys.modules["pyarrow"] = None
import persample
from persample import scan
assert hasattr(persample, "scan") and "Scan" in dir(persample)
try:
    scan(None, None, None)
except ImportError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "persample.scan needs pyarrow: pip install 'persample[scan]'\n"


def test_the_typed_script_uses_every_public_name(tmp_path: Path) -> None:
    """mypy checks the script in `make lint`; here it runs."""
    source = Path(str(typed_usage.__file__)).read_text()
    assert not [name for module, name in PUBLIC if module is not persample.testing and name not in source]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus
        for name, use in vars(typed_usage).items():
            if name.startswith("use_"):
                use(tmp_path / "scan") if name == "use_scan" else use()
