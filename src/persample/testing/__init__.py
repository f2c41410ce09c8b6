"""Tools for testing per-sample gradients: the loop oracle, and the batteries for a new rule or a new term.

Everything here raises AssertionError on a difference and needs torch alone, so that it works in any test runner.
"""

from persample.testing.oracle import assert_rows_close, loop_gradients
from persample.testing.rules import check_rule
from persample.testing.terms import check_term

__all__ = ["assert_rows_close", "check_rule", "check_term", "loop_gradients"]
