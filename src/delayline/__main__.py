"""`python -m delayline` is the `delayline` command."""

from delayline.cli import main

main(prog_name="delayline")
