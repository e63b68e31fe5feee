"""Entry point of the command: one module a subcommand, each with `register(subparsers)`.

A subcommand's module imports nothing heavy; its `run(args) -> int` does, and returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import DeepInferError
from . import bench, doctor, generate, plugins

__all__ = ["main"]

COMMANDS = (generate, bench, plugins, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 a failure with its reason on standard error, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="deepinfer", description="Building blocks for LLM inference.")
    parser.add_argument("--version", action="version", version=f"deepinfer {__version__}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    args = parser.parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except DeepInferError as error:
        print(f"deepinfer: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what a shell reports for a program ended by Ctrl-C
    except BrokenPipeError:
        # The reader left (`deepinfer plugins | head`); keep the interpreter from flushing into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
