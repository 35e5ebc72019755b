"""The version of ringway. All ranks of a job must have the same."""

VERSION = "0.1.0"
