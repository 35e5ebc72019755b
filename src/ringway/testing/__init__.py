"""Ranks for tests, and the conformance suite for backends.

`RankPool` runs a function on real processes; `check_backend("name")` runs the conformance suite on a backend.
`import ringway` imports nothing from here.
"""

from ringway.testing.conformance import CASES, Case, ConformanceFailed, Report, check_backend
from ringway.testing.pool import Outcome, RankContext, RankPool, RanksFailed
from ringway.testing.probe import Finding, Probe

__all__ = [
    "RankPool",
    "RankContext",
    "RanksFailed",
    "Outcome",
    "check_backend",
    "Report",
    "ConformanceFailed",
    "Case",
    "CASES",
    "Finding",
    "Probe",
]
