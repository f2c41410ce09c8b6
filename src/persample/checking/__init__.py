"""Comparison of a recording with a loop over the samples: `check()` and its report.

Other packages use `check` and `Report`.
"""

from persample.checking.compare import check
from persample.checking.report import ParameterReport, Report

__all__ = ["ParameterReport", "Report", "check"]
