"""`python -m ringway.cli`, where the command is not on the path."""

from ringway.cli import main

main()
