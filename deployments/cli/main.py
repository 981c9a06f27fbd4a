"""The command `atelier`. Thin: it parses, calls, and prints; exit code 2 is a mistake of the user.

Each group of commands has a file here; tools that serving does without are found by entry points. Heavy imports
(torch, Ray Serve) happen inside the commands that need them, so that the others answer at once.
"""

from __future__ import annotations

import os
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from configs.distribution import COMMANDS, installed_version, left_out_parts, optional_parts
from configs.errors import ConfigError
from deployments.cli import apply, chat, cluster, doctor, generate, keys, models, orders, run, status, weights, workflow
from deployments.console.client import ClientError
from deployments.console.output import OptionError

_app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"atelier {installed_version() or 'from a checkout that is not installed'}")
        raise typer.Exit


@_app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve hundreds of diffusion models and LLMs on one Ray cluster."""


for group in (cluster, run, apply, doctor, status, models, orders, generate, chat):
    _app.add_typer(group.app)
_app.add_typer(keys.app, name="keys")
_app.add_typer(weights.app, name="weights")
_app.add_typer(workflow.app, name="workflow")
for name, tool in optional_parts(COMMANDS).items():
    is_group = tool.registered_callback or len(tool.registered_commands) > 1
    _app.add_typer(tool, name=name if is_group else None)


def _say_what_is_left_out(context: typer.Context) -> NoReturn:
    raise OptionError(
        f"`atelier {context.info_name}` is a tool that this installation leaves out. "
        "Install Atelier from its repository: `pip install .` there, or `make setup`"
    )


for name in left_out_parts(COMMANDS):
    _app.command(
        name, hidden=True, add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_say_what_is_left_out)  # fmt: skip


def main() -> None:
    """Run the command line. Errors that people cause are one readable line, never a traceback."""
    from cluster.records.errors import ClusterError
    from deployments.ingress.access.keys import KeysFileError
    from deployments.records.errors import ServiceError
    from weights.records.errors import WeightsError

    try:
        _app()
    except (ConfigError, OptionError) as error:
        _fail(error, 2)
    except (ClientError, ClusterError, KeysFileError, ServiceError, WeightsError) as error:
        _fail(error, 1)
    except BrokenPipeError:
        os._exit(1)  # the reader of our output is gone; there is nobody to tell


def _fail(error: Exception, code: int) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
