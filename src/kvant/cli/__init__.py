"""The command ``kvant``: parsing, printing, exit codes."""

from kvant.cli.app import main

__all__ = ["main"]
