"""`delayline completion`: the shell's completion of commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from delayline.cli.options import examples

PROGRAM = "delayline"


@click.command(
    epilog=examples(
        """delayline completion bash > ~/.local/share/bash-completion/completions/delayline""",
        "delayline completion zsh > ~/.zfunc/_delayline   (with fpath+=~/.zfunc before compinit)",
        "delayline completion fish > ~/.config/fish/completions/delayline.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands and options of delayline."""
    complete = get_completion_class(shell)
    assert complete is not None  # noqa: S101 - click has one for each choice
    program = click.get_current_context().find_root().command
    click.echo(complete(program, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
