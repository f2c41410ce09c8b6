"""The report of a scan: one HTML file that says which examples stand out, and plots beside it."""

from persample.scanning.report.report import write_report

__all__ = ["write_report"]
