"""Loops that wait for something that is not there yet, by topic. Empty in a release."""

WAITING: dict[tuple[str, str], str] = {}
