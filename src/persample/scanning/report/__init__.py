"""The report of a scan: one HTML file that shows which examples stand out, and plots as PNG files.

Other packages may use `write_report`.
"""

from typing import TYPE_CHECKING

from persample._internal.lazy import find_lazily

if TYPE_CHECKING:
    from persample.scanning.report.report import write_report as write_report

__getattr__ = find_lazily(__name__, {"report": "write_report"})

__all__ = ["write_report"]
