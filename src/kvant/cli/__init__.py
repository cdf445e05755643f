"""The command ``kvant``: parse, print, exit codes."""

from kvant.cli.app import main

__all__ = ["main"]
