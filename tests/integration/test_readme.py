"""The README's Python runs as printed: block after block, in one namespace, without a warning.

Guards against names that no block defines, arguments that were renamed, and deprecated keywords.
"""

import re
from pathlib import Path

import pytest

import hf_sparsekv as skv
from hf_sparsekv.scorers import registry

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def _left_as_found(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    yield
    skv.unregister()


@pytest.mark.builtin_model
@pytest.mark.usefixtures("_left_as_found")
def test_the_python_blocks_run_in_order(builtin_model_path, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names = {"__name__": "readme"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, Python block {number}", "exec"), names)
    assert names["path"] == str(builtin_model_path)
    assert names["out"].text[0] in capsys.readouterr().out
    for report in (names["out"].report, names["cache"].report()):
        assert report["compression"] > 1.5
        assert not report["is_prompt_open"]
