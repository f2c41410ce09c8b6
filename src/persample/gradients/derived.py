"""Rows that are computed from others: other terms for the same rows, and rows of several recordings by unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from persample.distributed import Processes
from persample.errors import PerSampleError
from persample.gradients.intake import ForwardNotes, RecordedBatch
from persample.gradients.kept_terms import KeptTerms
from persample.gradients.rows import BatchRows, LossReduction
from persample.gradients.units import Units, combine_units
from persample.terms import Term, add_terms, merge_samples


def make_kept_terms(
    parameters: Mapping[str, Tensor],
    terms: Mapping[str, Term],
    count: int,
    units: Units | None = None,
    notes: ForwardNotes | None = None,
) -> KeptTerms:
    """Terms of a batch of `count` samples, in one process; parameters without a term have rows of zeros."""
    rows = BatchRows(parameters.values(), Processes())
    rows.set_found(count, units)
    batch = RecordedBatch(parameters, rows, "sum", nonfinite="keep", notes=notes or ForwardNotes())
    return _fill(KeptTerms(batch), terms)


def replace_terms(like: KeptTerms, terms: Mapping[str, Term], reduction: LossReduction) -> KeptTerms:
    """Other terms for the same rows and parameters."""
    alone = BatchRows(like.parameters.values(), Processes())  # the parameters are what `like` has made of them
    found = KeptTerms(RecordedBatch(like.parameters, alone, nonfinite=like.nonfinite))
    found.rows, found.reduction = like.rows, reduction
    return _fill(found, terms)


def combine_kept_terms(several: Sequence[KeptTerms]) -> KeptTerms:
    """The rows of several recordings with units, added up by unit."""
    first = several[0]
    if not all(kept.rows.is_alone for kept in several):
        raise PerSampleError("combine() is not available under several processes.")
    units, parts = combine_units([_get_units(kept.rows) for kept in several])
    combined: dict[str, Term] = {}
    for name in first.parameters:
        terms = []
        for kept, groups in zip(several, parts, strict=True):
            if (term := kept.stacks.find_term(name)) is not None:
                kept.check_done()
                terms.append(merge_samples(term, groups.scale(kept.scale)))
        if terms:
            combined[name] = add_terms(terms)
    count = sum(kept.rows.batch_size for kept in several)
    found = make_kept_terms(first.parameters, combined, count, units, first.notes.copy())
    found.nonfinite = first.nonfinite
    return found


def _get_units(rows: BatchRows) -> Units:
    if rows.units is None or not rows.units.are_named:
        raise PerSampleError("combine() needs recordings with the unit of each sample: record(model, units=ids).")
    return rows.units


def _fill(kept: KeptTerms, terms: Mapping[str, Term]) -> KeptTerms:
    for name, term in terms.items():
        kept.receive_rows(name, term)
    kept.is_backward_done = True
    return kept
