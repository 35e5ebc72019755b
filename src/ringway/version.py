"""The version of ringway. All ranks of a job must have the same."""

VERSION = "0.2.0"

OLDEST_TORCH, NEWEST_TORCH = "2.8", "2.15"
"""The oldest torch that ringway accepts, and the newest that the whole suite has passed on."""


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version such as 2.13.0+cpu."""
    major, minor, *_ = (*version.partition("+")[0].split("."), "0")
    return int(major), int("".join(digit for digit in minor if digit.isdigit()) or 0)
