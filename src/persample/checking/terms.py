"""Terms and the algorithms of their norms, in words."""

from __future__ import annotations

from persample.terms import Outer, Patches, Rows, Sum, Term, choose_norm_algorithm


def describe_term(term: Term) -> str:
    """Structure of a term, by class names.

    >>> import torch
    >>> outer = Outer(torch.ones(2, 3, 4), torch.ones(2, 3, 5))
    >>> describe_term(Sum([Rows(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, 4), 5), outer]))
    'Rows + Outer'
    """
    inner = " + ".join(dict.fromkeys(map(describe_term, _find_inner_terms(term))))
    if isinstance(term, Sum):
        return inner
    return f"{type(term).__name__}({inner})" if inner else type(term).__name__


def describe_norms(term: Term) -> str:
    """How the norms of a term are computed: "ghost", "dense" or "rows"; see `ParameterReport`.

    >>> import torch
    >>> describe_norms(Outer(torch.ones(2, 1, 4), torch.ones(2, 1, 5)))
    'ghost'
    >>> describe_norms(Outer(torch.ones(2, 9, 4), torch.ones(2, 9, 5)))
    'dense'
    """
    if inner := _find_inner_terms(term):
        return " + ".join(dict.fromkeys(map(describe_norms, inner)))
    if isinstance(term, Outer):
        return "ghost" if term.positions == 1 else choose_norm_algorithm(term.positions, *term.shape)
    if isinstance(term, Patches):
        return term.choose_norm_algorithm()
    return "rows" if isinstance(term, Rows) else "dense"


def _find_inner_terms(term: Term) -> list[Term]:
    """The terms that a composite term holds."""
    held = [part for value in vars(term).values() for part in (value if isinstance(value, (list, tuple)) else [value])]
    return [part for part in held if isinstance(part, Term)]
