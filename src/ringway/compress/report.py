"""What compression gained or cost: bytes saved, time saved or lost, and the relative error."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

SAMPLE_EVERY = 64
"""The relative error is measured on a slot's first call, and then on every call whose number is a multiple of this."""
SAMPLES_KEPT = 256


@dataclass
class Report:
    """Totals over the compressed calls of one `ErrorFeedback`."""

    calls: int = 0
    plain_calls: int = 0
    """Calls that `codec="auto"` sent uncompressed."""
    plain_bytes: int = 0
    """The bytes this rank would have sent without compression (with a ring all-reduce)."""
    sent_bytes: int = 0
    seconds: float = 0.0
    """Time spent in compressed calls on the CPU. Calls on a GPU are not timed: that would wait for the device."""
    predicted_plain_seconds: float = 0.0
    """The time `codec="auto"` predicts for those calls uncompressed; 0 without "auto"."""
    predicted_calls: int = 0
    _errors: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add_error(self, lost: Tensor, whole: Tensor) -> None:
        """Record the norms of what was lost and of what was to be sent. They are read only when the report is."""
        self._errors.append((lost, whole))
        del self._errors[:-SAMPLES_KEPT]

    @property
    def bytes_saved(self) -> int:
        return self.plain_bytes - self.sent_bytes

    @property
    def seconds_saved(self) -> float | None:
        """Negative if compression cost time; None if the time without compression is unknown."""
        if self.predicted_calls == 0:
            return None
        return self.predicted_plain_seconds - self.seconds * self.predicted_calls / max(self.calls, 1)

    @property
    def relative_error(self) -> float | None:
        """The share of the values that one step loses (both as 2-norms); feedback adds it to later steps."""
        ratios = [float(lost) / float(whole) for lost, whole in self._errors if float(whole) > 0]
        return sum(ratios) / len(ratios) if ratios else None

    def as_dict(self) -> dict[str, float | int | None]:
        return {
            "calls": self.calls,
            "plain_calls": self.plain_calls,
            "plain_bytes": self.plain_bytes,
            "sent_bytes": self.sent_bytes,
            "bytes_saved": self.bytes_saved,
            "seconds": self.seconds,
            "seconds_saved": self.seconds_saved,
            "relative_error": self.relative_error,
        }

    def __str__(self) -> str:
        parts = [f"{self.calls} compressed calls"]
        if self.plain_calls:
            parts.append(f"{self.plain_calls} left plain")
        if self.sent_bytes:
            parts.append(
                f"{self.bytes_saved / 1e6:.1f} MB of {self.plain_bytes / 1e6:.1f} MB saved "
                f"({self.plain_bytes / self.sent_bytes:.1f}x)"
            )
        saved = self.seconds_saved
        if saved is not None:
            parts.append(f"{abs(saved):.3f} s {'saved' if saved >= 0 else 'lost'}")
        error = self.relative_error
        if error is not None:
            parts.append(f"relative error {error:.3f}")
        return "compression: " + ", ".join(parts)
