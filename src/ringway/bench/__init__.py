"""Measuring collectives: cases, a runner that interleaves candidates, and tables.

    case = CASES["all_reduce"]
    places = {name: Place(...) for each candidate}       # same buffers' shapes, each its own memory
    results = measure([case.candidate("ringway", ringway, place), ...], Ranks(control_group))
    print_table(...)

Candidates alternate within one run on the same ranks, so that a disturbance affects all of them.
"""

from ringway.bench.cases import CASES, BenchCase, Place, WrongResult
from ringway.bench.runner import Candidate, Estimate, Measured, Ranks, measure, median_interval, paired_ratio
from ringway.bench.table import Row, print_table, rows, to_json

__all__ = [
    "CASES",
    "BenchCase",
    "Place",
    "WrongResult",
    "Candidate",
    "Measured",
    "Estimate",
    "Ranks",
    "measure",
    "median_interval",
    "paired_ratio",
    "Row",
    "rows",
    "print_table",
    "to_json",
]
