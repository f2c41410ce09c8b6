"""Which terms the weights of a torch function receive, a few lines each."""

from persample.rules import conv, embedding, linear, norm, recurrent
from persample.rules.registry import HANDLED_FUNCTIONS, Rewrite, Rule, rule

__all__ = ["HANDLED_FUNCTIONS", "Rewrite", "Rule", "conv", "embedding", "linear", "norm", "recurrent", "rule"]
