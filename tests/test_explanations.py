"""Each family of errors has a page, with an example that raises it."""

from __future__ import annotations

import pickle
import re
import traceback
from pathlib import Path

import pytest
import torch

import persample
from persample import PerSampleError
from persample.cli.commands import main
from persample.cli.explain import read_pages
from persample.errors import FAMILIES

pytestmark = pytest.mark.quick

PAGES = read_pages()
EXAMPLES = {code: re.findall(r"```python\n(.*?)```", page, re.DOTALL) for code, page in PAGES.items()}
DOCS = Path(__file__).parents[1] / "docs" / "reference" / "errors.md"


def test_each_family_has_a_page_with_a_way_out() -> None:
    assert {*PAGES} == {*FAMILIES}
    assert all("Way out:" in page for page in PAGES.values())
    docs = re.sub(r"<!-- test: .* -->\n", "", DOCS.read_text(encoding="utf-8"))
    assert all(page.strip() in docs for page in PAGES.values())
    assert [code for code, examples in EXAMPLES.items() if not examples] == ["E12"]  # needs several processes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("code", [code for code, examples in EXAMPLES.items() if examples])
def test_the_example_raises_an_error_of_the_family(code: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(PerSampleError) as caught:
        exec(EXAMPLES[code][0], {"torch": torch, "persample": persample})
    assert caught.value.code == code, str(caught.value)
    assert f"persample explain {code}" in "".join(traceback.format_exception(caught.value))
    assert "persample explain" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).code == code


def test_the_command_finds_a_page_by_code_and_by_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "e1"]) == 0 and "samples are mixed" in capsys.readouterr().out
    assert main(["explain", "The gradients of 2 samples are not finite"]) == 0 and "E8" in capsys.readouterr().out
    assert main(["explain"]) == 0 and len(capsys.readouterr().out.splitlines()) == len(PAGES)
    assert main(["explain", "nonsense"]) == 2


def test_an_error_of_no_family_has_no_note() -> None:
    error = PerSampleError("Something.")
    assert error.code is None and not hasattr(error, "__notes__")
