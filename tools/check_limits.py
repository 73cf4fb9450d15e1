"""Sizes that keep a newcomer oriented: Python files under 400 lines, functions under 60, .cuh and .cu files under 800.

A file that hits its limit hides a second noun; split it.
"""

import ast
import subprocess
import sys
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CUDA_LINES = 800
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def violations(path: Path) -> list[str]:
    """What is too long in one file."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if path.suffix != ".py":
        return [f"{path}: {lines} lines, at most {MAX_CUDA_LINES}"] if lines > MAX_CUDA_LINES else []
    found = [f"{path}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def main() -> int:
    """Check every tracked or new source file; print what is too long."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.cu", "*.cuh"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line for name in listing.stdout.split() if Path(name).exists() for line in violations(Path(name))]
    print("\n".join(found) or "no file or function is too long")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
