"""Extensions of griffe, which reads the source for the documentation: examples as code, and options one by one."""

import inspect
import re
from typing import Any

from griffe import Extension, Function, Object, Parameter, ParameterKind, dynamic_import


def fence_examples(text: str) -> str:
    """Put paragraphs that start with `>>>` into code blocks; Markdown would show them as quotations."""
    return re.sub(r"^>>> (?:.|\n(?!\n))*", lambda match: f"```pycon\n{match[0].rstrip()}\n```", text, flags=re.M)


class DoctestBlocks(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)


class ShownOptions(Extension):
    """Shows the options of functions with `**options: Unpack[...]` as `help()` does, which sees them at run time."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        if not any(str(decorator.value).startswith("show_options(") for decorator in func.decorators):
            return
        shown = dynamic_import(func.path)
        for name in [p.name for p in func.parameters if p.kind is ParameterKind.var_keyword]:
            del func.parameters[name]
        for option in inspect.signature(shown).parameters.values():
            if option.name not in func.parameters:
                default = None if option.default is option.empty else repr(option.default)
                kind = ParameterKind.keyword_only
                func.parameters.add(Parameter(option.name, annotation=option.annotation, kind=kind, default=default))
        assert func.docstring is not None
        func.docstring.value = fence_examples(inspect.getdoc(shown) or "")
