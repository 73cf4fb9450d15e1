"""The program for compute-sanitizer, as far as it runs without a GPU: its launches, and the arguments that ops take."""

import inspect
import re
from pathlib import Path
from typing import Any

import definitions
import pytest
from sanitize import main, run
from sanitize_cases import GROUPS, Launch
from torch import Tensor

BINDINGS = sorted((Path(__file__).parents[1] / "torch-ext").glob("*_binding.cpp"))


def schemas() -> dict[str, str]:
    """Op -> its arguments, from the sources: strings that C++ joins."""
    found = {}
    for binding in BINDINGS:
        for definition in re.findall(r"m\.def\((.*?)\);", binding.read_text(), re.DOTALL):
            schema = "".join(re.findall(r'"([^"]*)"', definition))
            name, arguments = schema.removesuffix(")").split("(", 1)
            found[name] = arguments.rsplit(") ->", 1)[0]
    return found


def launches() -> list[Launch]:
    return [launch for group in GROUPS.values() for launch in group()]


@pytest.mark.parametrize("group", GROUPS)
def test_launches_are_as_defined_where_definitions_launch(group: str) -> None:
    for launch in GROUPS[group]():
        run(definitions, launch, "cpu")


def test_every_op_has_a_launch_and_a_definition_with_its_arguments() -> None:
    found = schemas()
    assert {launch.op for launch in launches()} == found.keys() - {"decode_workspace_bytes"}
    for name, arguments in found.items():
        if name != "decode_workspace_bytes":
            given = re.findall(r"(\w+)(?:=[^,]+)?(?:, |$)", arguments)
            assert list(inspect.signature(getattr(definitions, name)).parameters) == given


def test_what_a_call_writes_is_compared() -> None:
    found = schemas()
    for launch in launches():
        written = set(re.findall(r"Tensor\(\w!\)\?? (\w+)", found[launch.op]))
        given = {name for name, value in launch.arguments.items() if value is not None}
        looked_at = {*launch.fresh, *launch.changed}
        assert written & given <= looked_at, launch.what


def test_a_wrong_result_is_told() -> None:
    class Ops:
        @staticmethod
        def key_anchor(anchor: Tensor, **given: Any) -> None:
            definitions.key_anchor(anchor, **given)
            anchor.mul_(1.01)

    with pytest.raises(AssertionError, match="`anchor`: error exceeds"):
        run(Ops, next(GROUPS["key_anchor"]()), "cpu")


def test_the_command_line_runs_what_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sanitize.py", "--device", "cpu", "--only", "key_anchor,write"])
    assert main() == 0
    assert re.fullmatch(
        r"key_anchor: 4 launches, .* s\nwrite: 9 launches, .* s\nall as defined\n", capsys.readouterr().out
    )
