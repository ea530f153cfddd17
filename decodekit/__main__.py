"""``python -m decodekit``."""

from decodekit.cli import main

main()
