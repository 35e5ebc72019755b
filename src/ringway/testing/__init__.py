"""Ranks for tests, and the suite that every backend passes.

`RankPool` runs a function on real processes; `check_backend("name")` runs the conformance suite on a backend.
Nothing here is imported by `import ringway`.
"""

from ringway.testing.pool import Outcome, RankContext, RankPool, RanksFailed

__all__ = ["Outcome", "RankContext", "RankPool", "RanksFailed"]
