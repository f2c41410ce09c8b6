"""Rules: which terms the weights of a torch function receive, a few lines for each function.

A rule gets its tensors with the samples in front and knows neither layouts nor autograd. Other packages use the names
below; `compute_generic_gradients` is the fallback for functions without a rule.
"""

from persample.rules import conv, elementwise, embedding, grouped, linear, matmul, norm, recurrent, rewrites
from persample.rules.generic import compute_generic_gradients
from persample.rules.norm import batch_norm_of_batch
from persample.rules.recurrent import CELLS
from persample.rules.registry import (
    HANDLED_FUNCTIONS,
    RULES_VERSION,
    Rewrite,
    Rule,
    find_adapter,
    get_handler,
    get_rules,
    is_handler,
    register_adapter,
    register_rule,
)

__all__ = [
    "CELLS",
    "HANDLED_FUNCTIONS",
    "RULES_VERSION",
    "Rewrite",
    "Rule",
    "batch_norm_of_batch",
    "compute_generic_gradients",
    "conv",
    "elementwise",
    "embedding",
    "find_adapter",
    "get_handler",
    "get_rules",
    "grouped",
    "is_handler",
    "linear",
    "matmul",
    "norm",
    "recurrent",
    "register_adapter",
    "register_rule",
    "rewrites",
]
