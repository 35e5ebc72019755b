"""`python -m ringway`, for when the command is not on the path."""

from ringway.cli import main

if __name__ == "__main__":
    main()
