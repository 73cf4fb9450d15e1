"""`hf-sparsekv`: the entry point, and how errors reach the terminal.

A subcommand's module is imported when it is called: torch takes seconds, and `--help` and `--version` need none of it.
"""

import errno
import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from hf_sparsekv.cli.interrupt import EXIT_BASE, MESSAGES, Interrupted, Terminated, importing, raising_on_sigterm
from hf_sparsekv.errors import ReplicaLostError, SparseKVError
from hf_sparsekv.version import __version__

USAGE_ERROR = 2
NOBODY_READS = 128 + signal.SIGPIPE
"""Exit code, as a shell sees it of other tools whose output goes to `head`."""

COMMANDS = {
    "generate": "Generate text with a sparse KV cache: stream it, then report what the cache held.",
    "demo": "Answer a question about a chapter of Python's own reference, with the dense and with the sparse cache.",
    "fetch": "Fetch the built-in model (SmolLM2-135M-Instruct) into the user's cache; quick when it is there already.",
    "plan": "Show the layer plan of a model: kind, tokens and bytes per layer, and the total against dense.",
    "doctor": "Tell what this machine has and which implementation each op uses.",
    "bench": "Measure serving: c requests live at any time, random prompts, exactly --output-len tokens each.",
    "eval": "Measure what a model loses with a sparse cache, on offline tasks or lm-eval's, paired with the dense one.",
    "run": "Generate for every line of a file, many at once; interrupted or killed, the same command goes on.",
}
"""Each subcommand's module in this folder, which has a function of the same name, and the docstring's first line."""

_NUM_PROCESSES = "WORLD_SIZE"
"""What a launcher of several processes sets."""
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""What writing to a full disk or a lost terminal gives; files of ours turn theirs into errors of ours."""

# The base of typer's usage errors, from whichever copy of click this release of typer uses.
_UsageError: Any = typer.BadParameter.__base__


class LazyGroup(TyperGroup):
    """The subcommands, known by name and one line until one is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What the overview needs of a subcommand."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The subcommand that is called, its module imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line; nothing is open yet, so a signal ends the program."""
        with importing():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; stop without a word when nobody reads its output any more."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            _drop_output()
            raise typer.Exit(NOBODY_READS) from error
        except KeyboardInterrupt as error:
            raise Interrupted from error


app = typer.Typer(
    name="hf-sparsekv", cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def load_command(name: str) -> Any:
    """A subcommand as typer runs it."""
    single = typer.Typer(add_completion=False)
    with importing():
        single.command(name)(getattr(import_module(f"hf_sparsekv.cli.{name}"), name))
    return typer.main.get_command(single)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"hf-sparsekv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hugging Face models generating with a small, layer-wise sparse KV cache."""


def main() -> None:
    """Run the command line; a user's mistake ends in one line on stderr and exit code 2."""
    try:
        with raising_on_sigterm():
            sys.exit(app(standalone_mode=False))
    except _UsageError as error:
        command = "hf-sparsekv" if error.ctx is None else error.ctx.command_path
        if sys.argv[1:]:
            _fail(f"{error.format_message()} (see {command} --help)")
        else:  # the help was shown
            sys.exit(USAGE_ERROR)
    except SparseKVError as error:
        _fail(str(error), is_consequence=isinstance(error, ReplicaLostError))
    except (KeyboardInterrupt, Interrupted, typer.Abort):
        _end_by(signal.SIGINT)
    except Terminated:
        _end_by(signal.SIGTERM)
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _drop_output()
        _fail(f"cannot write the output: {error.strerror}")


def _end_by(number: signal.Signals) -> None:
    if os.environ.get("RANK", "0") == "0":  # a launcher tells all of its processes
        Console(stderr=True).print(MESSAGES[number])
    sys.exit(EXIT_BASE + number)


def _drop_output() -> None:
    """Let what is still buffered go nowhere: Python would try to write it once more at exit, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ else 1)
    os.close(nowhere)


def _fail(message: str, *, is_consequence: bool = False) -> None:
    if _NUM_PROCESSES in os.environ:
        from hf_sparsekv.parallel.once import may_say

        if not may_say(message, is_consequence=is_consequence):
            sys.exit(USAGE_ERROR)
    line = escape(" ".join(message.split()))
    Console(stderr=True).print(f"[bold red]error:[/] {line}", highlight=False, soft_wrap=True)
    sys.exit(USAGE_ERROR)
