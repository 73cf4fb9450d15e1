"""`hf-sparsekv fetch`: download and convert the built-in small model."""

from typing import Annotated

import typer
from rich.console import Console

from hf_sparsekv.models_store import fetch_builtin


def fetch(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the folder.")] = False,
) -> None:
    """Fetch the built-in model (SmolLM2-135M-Instruct) into the user's cache; quick when it is there already."""
    console = Console(stderr=True)
    if quiet:
        path = fetch_builtin()
    else:
        with console.status("checking") as status:
            path = fetch_builtin(progress=status.update)
    typer.echo(str(path))
