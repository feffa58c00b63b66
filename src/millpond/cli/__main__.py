"""`python -m millpond.cli`, where the command itself is not on the path."""

from millpond.cli import main

main()
