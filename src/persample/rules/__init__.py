"""Which terms the weights of a torch function receive, a few lines each."""

from persample.rules import conv, elementwise, embedding, grouped, linear, matmul, norm, recurrent
from persample.rules.registry import (
    HANDLED_FUNCTIONS,
    Rewrite,
    Rule,
    find_adapter,
    get_handler,
    get_rules,
    register_adapter,
    register_rule,
)

__all__ = [
    "HANDLED_FUNCTIONS",
    "Rewrite",
    "Rule",
    "conv",
    "elementwise",
    "embedding",
    "find_adapter",
    "get_handler",
    "get_rules",
    "grouped",
    "linear",
    "matmul",
    "norm",
    "recurrent",
    "register_adapter",
    "register_rule",
]
