"""The version of the package (pyproject.toml reads it from here), and the versions of torch that it was tested with."""

__version__ = "0.1.0"

# The whole suite was run with these; docs/reference/versions.md has the results. Others give a warning.
TESTED_TORCH = ("2.13", "2.15")
