"""Versions: of ringway, Python and torch."""

from __future__ import annotations

import platform

import torch

from ringway.doctor.finding import Finding, Findings, ok, warning
from ringway.version import NEWEST_TORCH, VERSION, release


def software() -> Findings:
    facts = (platform.python_version(), platform.machine(), platform.release())
    yield ok("ringway", "{}, Python {}, {}, Linux {}".format(VERSION, *facts))
    yield _torch()


def _torch() -> Finding:
    if release(torch.__version__) > release(NEWEST_TORCH):
        says = f"{torch.__version__} is newer than {NEWEST_TORCH}, the newest that this ringway was tested with"
        return warning("torch", says, "If something fails, look for a newer ringway")
    return ok("torch", torch.__version__)
