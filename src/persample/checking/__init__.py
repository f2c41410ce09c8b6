"""Comparing a recording with a loop over the samples, and telling what was found."""

from persample.checking.check import check
from persample.checking.report import ParameterReport, Report

__all__ = ["ParameterReport", "Report", "check"]
