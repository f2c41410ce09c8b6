"""The diagonal of the Fisher matrix and Kronecker factors, against dense references in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, record, sample_labels
from persample.testing.oracle import loop_gradients, perturb

B, D, CLASSES = 3, 4, 3


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(7, D), nn.LayerNorm(D), nn.Linear(D, CLASSES)
        self.mix = nn.Parameter(torch.randn(D, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.words(x))
        return self.head(torch.einsum("btd,dhe->bthe", h, self.mix).flatten(2)).tanh().mean(1)


def make_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES))


CASES: dict[str, Any] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
        lambda: torch.randn(B, D, dtype=torch.float64),
    ),
    "text": (Text, lambda: torch.randint(0, 7, (B, 5))),
    "images": (make_images, lambda: torch.randn(B, 2, 4, 4, dtype=torch.float64)),
}


def make_case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make_model, make_batch = CASES[name]
    model = make_model().double()
    perturb(model)
    return model, make_batch()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", CASES)
def test_fisher_diagonal_over_all_labels(name: str, reduction: str) -> None:
    """Each sample with each label, weighted by its probability: the exact Fisher matrix."""
    model, x = make_case(name)
    repeated, labels = x.repeat_interleave(CLASSES, 0), torch.arange(CLASSES).repeat(B)
    with record(model) as grads:
        F.cross_entropy(model(repeated), labels, reduction=reduction).backward()
    chances = model(x).detach().softmax(1).flatten() / B
    found = grads.fisher_diagonal(chances)
    jacobians = {name: part for name, part in loop_gradients(model, (repeated, labels), nn.CrossEntropyLoss()).items()}
    for p_name, rows in jacobians.items():
        torch.testing.assert_close(found[p_name], torch.tensordot(chances, rows.square(), 1))
    given = grads.fisher_diagonal()
    for p_name, rows in jacobians.items():
        torch.testing.assert_close(given[p_name], rows.square().mean(0))


def test_fisher_diagonal_of_sampled_labels() -> None:
    model, x = make_case("mlp")
    count = 4000
    many = x[:1].expand(count, -1)
    with record(model) as grads:
        logits = model(many)
        F.cross_entropy(logits, sample_labels(logits, torch.Generator().manual_seed(0))).backward()
    chances = model(x[:1]).detach().softmax(1)[0]
    rows = loop_gradients(model, (x[:1].repeat(CLASSES, 1), torch.arange(CLASSES)), nn.CrossEntropyLoss())
    for name, part in grads.fisher_diagonal().items():
        exact = torch.tensordot(chances, rows[name].square(), 1)
        torch.testing.assert_close(part, exact, rtol=0.1, atol=0.05 * float(exact.max()))


def test_labels_of_positions() -> None:
    logits = torch.zeros(2, 5, 3)
    logits[0, :, 2] = logits[1, :, 1] = 99
    assert sample_labels(logits).tolist() == [[2] * 5, [1] * 5]


@pytest.mark.parametrize(("weights", "message"), [(torch.ones(2), "3 samples"), (-torch.ones(3), "negative")])
def test_wrong_weights_are_refused(weights: Tensor, message: str) -> None:
    model, x = make_case("mlp")
    with record(model) as grads:
        model(x).sum().backward()
    with pytest.raises(PerSampleError, match=message):
        grads.fisher_diagonal(weights)


# ---- Kronecker factors ----


def capture_sides(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """For each layer, of each sample: inputs `(positions, in)` and gradients of outputs `(positions, out)`."""
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def note(name: str, module: Any) -> None:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            (input,) = args
            if isinstance(module, nn.Conv2d):
                input = F.unfold(input, module.kernel_size, module.dilation, module.padding, module.stride).mT
            input = input.flatten(0, -2).detach()
            output.register_hook(lambda grad: keep(name, input, grad))

        module.register_forward_hook(hook)

    def keep(name: str, input: Tensor, grad: Tensor) -> None:
        inputs, grads = found.setdefault(name, ([], []))
        inputs.append(input)
        grads.append((grad.movedim(1, -1) if grad.dim() == 4 else grad).flatten(0, -2))

    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            note(f"{name}.weight", module)
    for n in range(len(x)):
        F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]).backward()
    return found


@pytest.mark.parametrize("kind", ["expand", "reduce"])
@pytest.mark.parametrize("name", CASES)
def test_factors_equal_those_of_captured_layers(name: str, kind: Any) -> None:
    model, x = make_case(name)
    y = torch.arange(B) % CLASSES
    with record(model) as grads:
        F.cross_entropy(model(x), y).backward()
    factors = grads.kfac_factors(kind)
    captured = capture_sides(model, x, y)
    assert captured.keys() <= factors.keys()
    assert "norm.weight" not in factors
    for p_name, (inputs, outputs) in captured.items():
        if kind == "reduce":
            inputs = [input.mean(0, keepdim=True) for input in inputs]
            outputs = [grad.sum(0, keepdim=True) for grad in outputs]
        a, g = torch.cat(inputs), torch.cat(outputs)
        torch.testing.assert_close(factors[p_name].input, a.T @ a / len(a))
        torch.testing.assert_close(factors[p_name].grad, g.T @ g / B)


@pytest.mark.parametrize("name", CASES)
def test_factors_of_one_sample_are_exact(name: str) -> None:
    """With one sample and one position, the product of the factors is the Fisher matrix of the weight."""
    model, x = make_case(name)
    with record(model) as grads:
        F.cross_entropy(model(x[:1]), torch.tensor([1])).backward()
    rows = grads.dense()
    for p_name, factors in grads.kfac_factors("reduce").items():
        if p_name not in ("0.weight", "2.weight", "3.weight") or (name == "images" and p_name == "0.weight"):
            continue
        row = rows[p_name][0].flatten()
        torch.testing.assert_close(torch.kron(factors.grad, factors.input), torch.outer(row, row))


def test_padding_does_not_count() -> None:
    model, x = make_case("mlp")
    y = torch.arange(B) % CLASSES
    with record(model) as expected:
        F.cross_entropy(model(x), y).backward()
    with record(model, units=[0, 0, 1]) as grads:  # the second unit is padded
        F.cross_entropy(model(x), y).backward()
    found, wanted = grads.kfac_factors()["0.weight"], expected.kfac_factors()["0.weight"]
    torch.testing.assert_close(found.input, wanted.input)
    torch.testing.assert_close(found.grad * 2, wanted.grad * 3)  # the sums are the same, over 2 and 3 rows


def test_units_of_very_different_sizes() -> None:
    model, x = make_case("text")
    x = x.repeat(4, 1)
    y = torch.arange(len(x)) % CLASSES
    with record(model) as expected:
        F.cross_entropy(model(x), y).backward()
    with record(model, units=[0] * 8 + [1, 2, 3, 4]) as grads:
        F.cross_entropy(model(x), y).backward()
    found, wanted = grads.kfac_factors()["head.weight"], expected.kfac_factors()["head.weight"]
    torch.testing.assert_close(found.input, wanted.input)
    torch.testing.assert_close(found.grad * 5, wanted.grad * 12)


def test_factors_that_norms_have_replaced_are_missed() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(2, 2).double(), torch.randn(B, 50, 2, dtype=torch.float64)
    with record(model) as grads:
        model(x).square().flatten(1).sum(1).mean().backward()
    assert grads.kfac_factors()["weight"].input.shape == (2, 2)
    grads.norms()
    with pytest.raises(PerSampleError, match=r"\['weight'\] were replaced"):
        grads.kfac_factors()


def test_unknown_kind_is_refused() -> None:
    model, x = make_case("mlp")
    with record(model) as grads:
        model(x).sum().backward()
    with pytest.raises(PerSampleError, match="'expand' or 'reduce'"):
        grads.kfac_factors("other")  # type: ignore[arg-type]
