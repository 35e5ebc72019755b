"""Ranks for tests, and the suite that every backend passes.

`RankPool` runs a function on real processes; `check_backend("name")` runs the conformance suite on a backend.
Nothing here is imported by `import ringway`.
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
