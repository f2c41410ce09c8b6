"""An extension of griffe, which reads docstrings for the documentation: shows their examples as code."""

import re
from typing import Any

from griffe import Extension, Object


def fence_examples(text: str) -> str:
    """Put paragraphs that start with `>>>` into code blocks; Markdown would show them as quotations."""
    return re.sub(r"^>>> (?:.|\n(?!\n))*", lambda match: f"```pycon\n{match[0].rstrip()}\n```", text, flags=re.M)


class DoctestBlocks(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)
