"""All that is wrong with data, as types of issues with flags and scores. Each family has its own module."""

from persample.scanning.issues.base import Issue, Issues
from persample.scanning.issues.find import find_issues

__all__ = ["Issue", "Issues", "find_issues"]
