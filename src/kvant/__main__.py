"""``python -m kvant``."""

from kvant.cli import main

main()
