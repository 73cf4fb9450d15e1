"""`hf-sparsekv fetch`: download and convert the built-in small model."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hf_sparsekv.models_store import fetch_builtin


def fetch(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the folder.")] = False,
) -> None:
    """Fetch the built-in model (SmolLM2-135M-Instruct) into the user's cache; quick when it is there already."""
    console = Console(stderr=True)
    if quiet:
        path = fetch_builtin()
    elif not console.is_terminal:  # a log shows each stage on a line of its own
        path = fetch_builtin(progress=lambda stage: typer.echo(stage, err=True))
    else:
        with console.status("checking") as status:
            path = fetch_builtin(progress=lambda stage: status.update(escape(stage)))
    typer.echo(str(path))
