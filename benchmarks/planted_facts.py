"""Do methods of influence find the documents that a fact was learnt from? Recall and rank of planted documents.

    python -m benchmarks.planted_facts [--write] [--documents N] [--epochs N]

A GPT is trained on generated documents. Each fact, "subject relation value", is planted in a few documents, between
sentences of a Markov chain. A query is a fact on its own, and its loss is that of the value. Other documents have the
subject with another relation, so that it is not enough to look for the subject. For each method: the share of the
planted documents among the first k (k is the number of planted ones), and the mean reciprocal rank of the first one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from benchmarks.damping_tasks import Transformer
from benchmarks.machine import describe_machine
from benchmarks.output import RESULTS, write_json
from persample.scanning import score

SUBJECTS, RELATIONS, VALUES, WORDS, LENGTH = 40, 4, 40, 120, 24
FACTS, PLANTED, LAYERS, WIDTH, CHECKPOINTS = 40, 4, 2, 96, 4
TOKENS = SUBJECTS + RELATIONS + VALUES + WORDS
RESAMPLES = 500


@dataclass(frozen=True)
class Corpus:
    """Documents `(documents, LENGTH)`; `queries` `(facts, LENGTH)`; and which documents have each fact."""

    documents: Tensor
    queries: Tensor
    is_planted: Tensor


def make_corpus(count: int, seed: int = 0) -> Corpus:
    """Documents with a triple at a random place: a fact, or a subject with a random relation and value."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high, *size: torch.randint(high, size, generator=generator)  # noqa: E731
    chain = torch.softmax(3 * torch.randn(WORDS, WORDS, generator=generator), 1)
    words = draw(WORDS, count + FACTS, 1)
    for _ in range(LENGTH - 1):
        following = torch.multinomial(chain[words[:, -1]], 1, generator=generator)
        words = torch.cat([words, following], 1)
    text = words + SUBJECTS + RELATIONS + VALUES
    facts = torch.stack([torch.arange(FACTS) % SUBJECTS, draw(RELATIONS, FACTS), draw(VALUES, FACTS)], 1)
    triples = torch.stack([draw(SUBJECTS, count), draw(RELATIONS, count), draw(VALUES, count)], 1)
    places = torch.randperm(count, generator=generator)[: FACTS * PLANTED].view(FACTS, PLANTED)
    is_clash = (triples[:, None, :2] == facts[None, :, :2]).all(2).any(1)  # another value for a fact
    triples[is_clash, 1] = (triples[is_clash, 1] + 1) % RELATIONS
    triples[places] = facts[:, None]
    offsets = torch.tensor([0, SUBJECTS, SUBJECTS + RELATIONS])
    starts = draw(LENGTH - 3, count)
    text[torch.arange(count)[:, None], starts[:, None] + torch.arange(3)] = triples + offsets
    text[count:, LENGTH - 3 :] = facts + offsets
    is_planted = torch.zeros(FACTS, count, dtype=torch.bool)
    is_planted[torch.arange(FACTS)[:, None], places] = True
    return Corpus(text[:count], text[count:], is_planted)


def train(corpus: Corpus, epochs: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A GPT and checkpoints of its training."""
    torch.manual_seed(0)
    model = Transformer(TOKENS, WIDTH, LENGTH - 1, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    states = []
    for epoch in range(1, epochs + 1):
        for ids in torch.randperm(len(corpus.documents)).split(32):
            documents = corpus.documents[ids]
            optimizer.zero_grad()
            F.cross_entropy(model(documents[:, :-1]), documents[:, 1:]).backward()
            optimizer.step()
        if epoch * CHECKPOINTS // epochs > (epoch - 1) * CHECKPOINTS // epochs:
            states.append({name: p.detach().clone() for name, p in model.state_dict().items()})
    return model, states


def compute_value_losses(model: Any, batch: Any) -> Tensor:
    """The loss of the last token of each query: the value of the fact."""
    return F.cross_entropy(model(batch[0])[:, :, -1], batch[1][:, -1], reduction="none")


def list_methods(model: nn.Module, states: Any, corpus: Corpus) -> dict[str, Callable[[], Tensor]]:
    """The scores of each method."""
    data = corpus.documents[:, :-1], corpus.documents[:, 1:]
    queries = corpus.queries[:, :-1], corpus.queries[:, 1:]
    loss_fn, options = nn.CrossEntropyLoss(), {"checkpoints": states, "progress": False}

    def scan(method: Any, precondition: Any = None) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            found = persample.scan(
                model, loss_fn, data, precondition=precondition, quantities=["loss", "norm"], **options
            )
            return found.scores(queries, method, measure=compute_value_losses)

        return compute

    def exact(**asked: Any) -> Callable[[], Tensor]:
        return lambda: score(model, loss_fn, data, queries, measure=compute_value_losses, **asked, **options)

    def count_tokens() -> Tensor:
        triple = corpus.queries[:, LENGTH - 3 :]
        return (corpus.documents[None, :, :, None] == triple[:, None, None]).any(2).sum(2).double()

    return {
        "tokens of the fact in the document, no influence": count_tokens,
        "scan, tracin": scan("tracin"),
        "scan, cosine": scan("cosine"),
        "scan, whitened": scan("whitened"),
        "scan, trak": scan("trak"),
        "scan, precondition kfac": scan("whitened", "kfac"),
        "scan, precondition kfac, cosine": scan("cosine", "kfac"),
        "score, identity": exact(method="identity"),
        "score, ekfac": exact(),
        "score, ekfac, cosine": exact(cosine=True),
    }


def measure_ranking(scores: Tensor, is_planted: Tensor) -> dict[str, dict[str, float]]:
    """Recall at the number of planted documents, and the mean reciprocal rank of the first, with 95 % intervals."""
    order = scores.argsort(1, descending=True)
    found = is_planted.gather(1, order)
    recall = found[:, :PLANTED].double().mean(1)
    reciprocal = 1 / (1 + found.double().argmax(1))
    values = {f"recall@{PLANTED}": recall, "mrr": reciprocal}
    return {name: estimate_mean(part.double()) for name, part in values.items()}


def estimate_mean(values: Tensor) -> dict[str, float]:
    """The mean with a 95 % bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    means = values[torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"value": float(values.mean()), "low": low, "high": high}


def main() -> None:
    """Train, score by each method, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/planted_facts.json")
    parser.add_argument("--documents", type=int, default=2000, help="number of documents (default: 2000)")
    parser.add_argument("--epochs", type=int, default=12, help="epochs of the training (default: 12)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = make_corpus(options.documents)
    model, states = train(corpus, options.epochs)
    with torch.no_grad():
        logits = model(corpus.queries[:, :-1])[:, :, -1]
    known = float((logits.argmax(1) == corpus.queries[:, -1]).double().mean())
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "documents": options.documents,
        "parameters": sum(p.numel() for p in model.parameters()),
        "facts known": known,
        "methods": {},
    }
    print(f"facts known: {known:.2f}", flush=True)
    for name, compute in list_methods(model, states, corpus).items():
        start = time.process_time()
        found = measure_ranking(compute(), corpus.is_planted)
        results["methods"][name] = {**found, "processor_seconds": time.process_time() - start}
        print(f"{name}: {json.dumps(results['methods'][name])}", flush=True)
    if options.write:
        write_json(RESULTS / "planted_facts.json", results)


if __name__ == "__main__":
    main()
