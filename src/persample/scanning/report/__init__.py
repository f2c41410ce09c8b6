"""The report of a scan: one HTML file that shows which examples stand out, and plots as PNG files.

Other packages may use `write_report`.
"""

from persample.scanning.report.report import write_report

__all__ = ["write_report"]
