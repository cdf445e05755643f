"""``python -m kvant``."""

from kvant_command import main

main()
