"""Other libraries in `benchmarks.attribution`: influence scores `(tests, examples)` from the same models.

A positive score means, as in persample, that the training example lowers the loss of the test sample. Each function
takes the task, its trained models, the checkpoints of the first one, and the strength of its damping; None stands for
the default of the library.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.attribution_tasks import Pair, Task

PROJECT = 512
HEURISTIC = -1.0  # kronfluence: a tenth of the mean eigenvalue of each layer
States = Sequence[dict[str, Tensor]]


def score_with_traker(task: Task, models: Sequence[nn.Module], checkpoints: States, damping: float | None) -> Tensor:
    """TRAK of the traker library, with an ensemble of the models."""
    from trak import TRAKer

    count, tests = len(task.data[0]), len(task.test[0])
    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            task.make_model(),
            "image_classification",
            count,
            save_dir=folder,
            load_from_save_dir=True,
            device="cpu",
            proj_dim=PROJECT,
            use_half_precision=False,
            logging_level=logging.ERROR,
            lambda_reg=damping or 0.0,
        )
        for i, model in enumerate(models):
            traker.load_checkpoint(model.state_dict(), model_id=i)
            for inputs, labels in _iterate(task.data):
                traker.featurize(batch=(inputs, labels), num_samples=len(labels))
        traker.finalize_features()
        for i, model in enumerate(models):
            traker.start_scoring_checkpoint("tests", model.state_dict(), model_id=i, num_targets=tests)
            for inputs, labels in _iterate(task.test):
                traker.score(batch=(inputs, labels), num_samples=len(labels))
        return torch.tensor(traker.finalize_scores("tests")).T.double()


class _Fitted:
    """The factors of kronfluence for each model, fitted once for all dampings."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.analyzers: dict[int, Any] = {}


_fitted: dict[int, _Fitted] = {}


def score_with_kronfluence(
    task: Task, models: Sequence[nn.Module], checkpoints: States, damping: float | None
) -> Tensor:
    """EK-FAC influence of kronfluence, averaged over the models. It covers linear and convolutional layers."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task as KronfluenceTask

    class Classification(KronfluenceTask):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            labels = torch.multinomial(logits.detach().softmax(-1), 1).flatten() if sample else batch[1]
            return F.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    fitted = _fitted.setdefault(id(task), _Fitted())
    total = torch.zeros(len(task.test[0]), len(task.data[0]), dtype=torch.float64)
    for i, model in enumerate(models):
        if i not in fitted.analyzers:
            own = task.make_model()
            own.load_state_dict(model.state_dict())
            prepared = prepare_model(own, Classification())
            analyzer = Analyzer(
                f"model{i}",
                prepared,
                Classification(),
                cpu=True,
                disable_tqdm=True,
                log_level=logging.ERROR,
                output_dir=fitted.folder.name,
            )
            analyzer.fit_all_factors(
                "factors",
                TensorDataset(*task.data),
                per_device_batch_size=100,
                factor_args=FactorArguments(strategy="ekfac"),
                overwrite_output_dir=True,
            )
            fitted.analyzers[i] = analyzer
        options = {} if damping is None else {"damping_factor": None if damping == HEURISTIC else damping}
        fitted.analyzers[i].compute_pairwise_scores(
            "scores",
            "factors",
            TensorDataset(*task.test),
            TensorDataset(*task.data),
            per_device_query_batch_size=100,
            per_device_train_batch_size=100,
            score_args=ScoreArguments(**options),
            overwrite_output_dir=True,
        )
        scores = fitted.analyzers[i].load_pairwise_scores("scores")
        total += scores["all_modules"].double() / len(models)
    return total


def score_with_captum(task: Task, models: Sequence[nn.Module], checkpoints: States, damping: float | None) -> Tensor:
    """TracIn of Captum, summed over the checkpoints of one training, with all parameters."""
    from captum.influence import TracInCP

    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{i}.pt") for i in range(len(checkpoints))]
        for path, state in zip(paths, checkpoints, strict=True):
            torch.save(state, path)

        def load(model: nn.Module, path: str) -> float:
            model.load_state_dict(torch.load(path, weights_only=True))
            return 1.0

        tracin = TracInCP(
            task.make_model().eval(),
            TensorDataset(*task.data),
            paths,
            load,
            loss_fn=nn.CrossEntropyLoss(reduction="none"),
            batch_size=100,
            sample_wise_grads_per_batch=False,
        )
        parts = [tracin.influence(batch, show_progress=False) for batch in _iterate(task.test)]
    return torch.cat([part if isinstance(part, Tensor) else part[0] for part in parts]).double()


def score_with_dattri(task: Task, models: Sequence[nn.Module], checkpoints: States, damping: float | None) -> Tensor:
    """TRAK of dattri, with an ensemble of the models."""
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.task import AttributionTask

    model = task.make_model().eval()

    def compute_margin(params: Any, pair: Any) -> Tensor:
        logits = torch.func.functional_call(model, params, pair[0].unsqueeze(0))
        logp = -F.cross_entropy(logits, pair[1].unsqueeze(0))
        return logp - torch.log(1 - torch.exp(logp) + 1e-9)

    def compute_probability(params: Any, pair: Any) -> Tensor:
        logits = torch.func.functional_call(model, params, pair[0].unsqueeze(0))
        return torch.exp(-F.cross_entropy(logits, pair[1].unsqueeze(0)))

    attribution = AttributionTask(
        loss_func=compute_margin, model=model, checkpoints=[dict(own.state_dict()) for own in models]
    )
    attributor = TRAKAttributor(
        attribution,
        correct_probability_func=compute_probability,
        projector_kwargs={"proj_dim": PROJECT, "device": "cpu"},
        device="cpu",
        regularization=damping or 0.0,
    )
    loaders = [DataLoader(TensorDataset(*part), batch_size=100) for part in (task.data, task.test)]
    attributor.cache(loaders[0])
    with torch.no_grad():
        return attributor.attribute(loaders[1]).T.double()


def _iterate(data: Pair, size: int = 100) -> list[Pair]:
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


Peer = Callable[[Task, Sequence[nn.Module], States, float | None], Tensor]

EKFAC_DAMPINGS = (None, HEURISTIC, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)

# Name, function, number of models, and the dampings that are tried; None is the default of the library.
PEERS: list[tuple[str, Peer, int, tuple[float | None, ...]]] = [
    ("captum TracInCP", score_with_captum, 1, (None,)),
    ("traker TRAK, 5 models", score_with_traker, 5, (None, 1.0, 10.0, 100.0, 1000.0, 1e4)),
    ("dattri TRAK, 5 models", score_with_dattri, 5, (None, 1e-3, 0.01, 0.1, 1.0, 10.0)),
    ("kronfluence EK-FAC", score_with_kronfluence, 1, EKFAC_DAMPINGS),
    ("kronfluence EK-FAC, 5 models", score_with_kronfluence, 5, EKFAC_DAMPINGS),
]
