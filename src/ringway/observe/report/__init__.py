"""`ringway report`: a trace as one page that opens without a network."""

from ringway.observe.report.page import report

__all__ = ["report"]
