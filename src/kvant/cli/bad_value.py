"""The error of a flag or value that cannot be: it names the flag, what was given and what was expected."""

from typer.exceptions import TyperException


class BadValueError(TyperException):
    """A value that a flag cannot take; the command ends with exit code 2."""

    exit_code = 2
