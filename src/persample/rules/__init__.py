"""Rules: which terms the weights of a torch function receive, a few lines for each function.

A rule gets its tensors with the samples in front and knows neither layouts nor autograd. Other packages use the names
below, and `generic`, the fallback for functions without a rule.
"""

from persample.rules import conv, elementwise, embedding, grouped, linear, matmul, norm, recurrent, rewrites
from persample.rules.norm import batch_norm_of_batch
from persample.rules.registry import (
    HANDLED_FUNCTIONS,
    Rewrite,
    Rule,
    count_rule_changes,
    find_adapter,
    get_handler,
    get_rules,
    is_handler,
    register_adapter,
    register_rule,
)

__all__ = [
    "HANDLED_FUNCTIONS",
    "Rewrite",
    "Rule",
    "batch_norm_of_batch",
    "conv",
    "count_rule_changes",
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
