"""Renders pages: single HTML files without external resources."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

_SHARED = "persample.scanning.report"  # with base.html, charts.html and report.css


def render(package: str, *, title: str, style: str = "", script: str | None = None, **context: Any) -> str:
    """The page of `template.html` in a package, which extends `base.html`.

    Args:
        package: the package with the files of the page.
        title: the title.
        style: a file with styles beside those of the report; empty for none.
        script: a file with the script of the page. The page allows no other script.
        context: `kind`, `about` and `page` for the head and the foot, and what else the template takes.
    """
    folder, shared = files(package), files(_SHARED)
    styles = (shared / "report.css").read_text("utf-8") + ((folder / style).read_text("utf-8") if style else "")
    code = (folder / script).read_text("utf-8") if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    loader = jinja2.FunctionLoader(lambda name: (shared / name).read_text("utf-8"))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    template = environment.from_string((folder / "template.html").read_text("utf-8"))
    return template.render(title=title, style=Markup(styles), script=Markup(code), digest=digest, **context)
