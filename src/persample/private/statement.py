"""A statement of what a private training guarantees, for others to read and to compute again.

The sections have the order of the questions of NIST SP 800-226: the parameters and the unit of the guarantee, the
algorithm, its implementation and how it was checked, and what remains with the people who hold the data.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from opacus.accountants import create_accountant

from persample._internal.files import write_atomically
from persample._internal.text import format_table
from persample._version import __version__
from persample.private.accounting import describe_accountant, get_neighbours
from persample.private.auditing import AuditResult
from persample.private.errors import PrivateTrainingError
from persample.private.optimizer import PrivateOptimizer

if TYPE_CHECKING:
    from persample.private.engine import PrivacyEngine

SECTIONS = ("guarantee", "algorithm", "accounting", "implementation", "verification", "audit", "your part")
_TOLERANCE = 1e-6  # of epsilon that is computed again, relative

_YOUR_PART = [
    "The data set has one index, or one unit, for each person to protect. Nothing else about it depends on the data.",
    "What depends on samples outside of the released weights is not covered: logged losses, metrics, choices of "
    "hyper-parameters, messages, memory and time of a step.",
    "Statistics of a batch before the model is called, and numbers that leave torch and come back in a later step.",
    "A generator that was given to the data loader has a secret seed.",
    "Who collects, stores and reads the data and the checkpoints during the training is trusted.",
]


def make_statement(engine: PrivacyEngine, delta: float, audit: AuditResult | None) -> dict[str, Any]:
    """The statement of an engine's training; raises if a condition of the guarantee was not met."""
    unmet = list(_find_unmet_conditions(engine, audit))
    if unmet:
        raise PrivateTrainingError("No statement of privacy can be written: " + "; ".join(unmet) + ".")
    optimizers: list[PrivateOptimizer] = engine.optimizers
    history = [list(steps) for steps in engine.accountant.history]
    contents: list[Any] = [
        {
            "epsilon": float(engine.get_epsilon(delta)),
            "delta": delta,
            "unit": _describe_unit(optimizers[0]),
            "neighbours": get_neighbours(engine.accountant),
            "released": "the weights after each step, and the noised gradients",
        },
        _describe_algorithm(optimizers, history),
        {
            **describe_accountant(engine.accountant),
            "history": history,  # noise multiplier, sample rate, number of steps
        },
        _describe_implementation(engine),
        {
            "mode": [str(optimizer.verify_mode) for optimizer in optimizers],
            "backward passes of this process": dict(sum((o.verifications for o in optimizers), Counter())),
            "meaning": "samples were run alone and compared with the batch; 'first': once for each kind of pass; "
            "a number n: again after 1 to n further passes",
        },
        None if audit is None else _describe_audit(audit),
        _YOUR_PART,
    ]
    return {"format": 1, **dict(zip(SECTIONS, contents, strict=True))}


def _describe_algorithm(optimizers: Sequence[PrivateOptimizer], history: Sequence[Sequence[Any]]) -> dict[str, Any]:
    mechanisms = [optimizer.mechanism for optimizer in optimizers]
    independent = {
        "mechanism": "Gaussian mechanism on Poisson samples, composed over the steps (DP-SGD)",
        "noise": "noise multiplier times the bound, in each real coordinate of the sum",
        "sampler": "Poisson: each unit is in a batch with the sample rate, independently",
    }
    described = [independent if mechanism is None else mechanism.describe() for mechanism in mechanisms]
    return {
        **{name: "; then ".join(dict.fromkeys(part[name] for part in described)) for name in independent},
        "clipping": [optimizer.clipping for optimizer in optimizers],
        "bound": [float(optimizer.max_grad_norm) for optimizer in optimizers],
        "counted steps" if any(mechanisms) else "steps": sum(int(steps[2]) for steps in history),
    }


def _find_unmet_conditions(engine: PrivacyEngine, audit: AuditResult | None) -> Iterator[str]:
    if not engine.optimizers or not engine.accountant.history:
        yield "the engine has made no step"
    for optimizer in engine.optimizers:
        if not isinstance(optimizer, PrivateOptimizer):
            yield "the gradients of the samples were filled in from outside (grad_sample_mode='no_op')"
            continue
        if not optimizer.poisson_sampling:
            yield "the batches were no Poisson samples, so that epsilon is an estimate"
        if optimizer.generator is not None and not optimizer.secure_mode:
            yield "the noise came from noise_generator, whose seed the program may know"
    if len({_describe_unit(optimizer) for optimizer in engine.optimizers}) > 1:
        yield "the trainings of this engine protect different units"
    if any(not noise for noise, _, _ in engine.accountant.history):
        yield "some steps had no noise"
    if engine.accountant.mechanism() == "gdp":
        yield "the accountant 'gdp' computes an approximation, and no upper bound of epsilon (use 'rdp' or 'prv')"
    if audit is not None and audit.exceeds:
        yield "the audit contradicts the claim"


def _describe_unit(optimizer: Any) -> str:
    units = getattr(optimizer, "units", None)  # not of Opacus
    if units == "ids":
        return "all examples that unit_ids gives to one unit"
    return "one index of the data set" + (f", with {units} samples made of it" if units else "")


def _describe_implementation(engine: PrivacyEngine) -> dict[str, Any]:
    secure = "Opacus' secure_mode (torchcsprng)"
    own = "AES-256 in counter mode on a CPU, elsewhere torch's generator with seeds from AES; keys of the system"
    return {
        "software": {"persample": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "noise generator": secure if engine.secure_mode else own,
        "processes": engine.optimizers[0].process_count,
        "floating point": "sums and noise in at least 32 bits; a sample adds at most 1.0001 times the bound; the noise "
        "is a discrete approximation of a Gaussian",
        "samples that are not finite": "add nothing",
    }


def _describe_audit(audit: AuditResult) -> dict[str, Any]:
    return {name: value for name, value in audit.to_dict().items() if not name.startswith("scores")}


def write_statement(path: str | Path, statement: Mapping[str, Any]) -> None:
    """Write a statement as JSON."""
    with write_atomically(Path(path)) as file:
        file.write(json.dumps(statement, indent=1).encode() + b"\n")


# ---- for readers ----


@dataclass(frozen=True)
class PrivacyStatement:
    """A statement of `PrivacyEngine.write_statement`, with epsilon computed again from its history of steps.

    >>> PrivacyStatement({"guarantee": {"epsilon": 1.0}}, epsilon=1.0).is_right
    True
    """

    contents: Mapping[str, Any]
    epsilon: float

    @property
    def is_right(self) -> bool:
        """Whether epsilon is as stated."""
        return math.isclose(self.contents["guarantee"]["epsilon"], self.epsilon, rel_tol=_TOLERANCE)

    def __str__(self) -> str:
        paragraphs = []
        for name in SECTIONS:
            rows = [[part, _render(value)] for part, value in _list_rows(self.contents[name])]
            paragraphs.append(f"{name.capitalize()}\n" + format_table(rows, indent="  "))
        verdict = "as stated" if self.is_right else f"but {self.contents['guarantee']['epsilon']} is stated"
        return "\n\n".join([*paragraphs, f"Epsilon, computed again, is {self.epsilon:.6g}, {verdict}."])


def read_statement(path: str | Path) -> PrivacyStatement:
    """Read the file of a statement, which may come from somebody else, and compute epsilon again.

    Raises an error for any other file.

    >>> from tempfile import mkdtemp
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from persample.private import PrivacyEngine
    >>> model, engine = torch.nn.Linear(3, 2), PrivacyEngine()
    >>> model, optimizer, loader = engine.make_private(
    ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
    ...     max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=5))
    >>> for (x,) in loader:
    ...     optimizer.zero_grad()
    ...     model(x).square().sum(1).mean().backward()
    ...     optimizer.step()
    >>> path = f"{mkdtemp()}/privacy.json"
    >>> engine.write_statement(path, delta=1e-3)
    >>> read_statement(path).is_right
    True
    """
    try:
        contents = json.loads(Path(path).read_text())
        if contents["format"] != 1 or any(name not in contents for name in SECTIONS):
            raise KeyError("format")
        delta = float(contents["guarantee"]["delta"])
        accountant = create_accountant(mechanism=contents["accounting"]["accountant"])
        accountant.history = [
            (float(noise), float(rate), int(steps)) for noise, rate, steps in contents["accounting"]["history"]
        ]
        return PrivacyStatement(contents, float(accountant.get_epsilon(delta)))
    except (ValueError, TypeError, KeyError) as error:
        raise PrivateTrainingError(
            f"{path} is no statement that engine.write_statement() of this version has written "
            f"({type(error).__name__}: {error})."
        ) from error


def _list_rows(section: Any) -> list[tuple[str, Any]]:
    if isinstance(section, Mapping):
        return list(section.items())
    return [("-", value) for value in section] if section else [("-", "none")]


def _render(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_render(part)}" for name, part in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_render, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
