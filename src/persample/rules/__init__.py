"""Which terms the weights of a torch function receive, a few lines each."""

from persample.rules import conv, embedding, grouped, linear, norm, recurrent
from persample.rules.registry import HANDLED_FUNCTIONS, Rewrite, Rule, handler_of, rule

__all__ = [
    "HANDLED_FUNCTIONS",
    "Rewrite",
    "Rule",
    "conv",
    "embedding",
    "grouped",
    "handler_of",
    "linear",
    "norm",
    "recurrent",
    "rule",
]
