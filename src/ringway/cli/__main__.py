"""`python -m ringway.cli`, for when the command is not on the path."""

from ringway.cli import main

main()
