"""What compression brought: bytes saved, time saved or lost, and how much of the values was lost on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

SAMPLE_EVERY = 64
"""The relative error is taken on the first call of a slot, and then on one call in so many."""
SAMPLES_KEPT = 256


@dataclass
class Report:
    """Sums over the compressed calls of one `ErrorFeedback`."""

    calls: int = 0
    plain_calls: int = 0
    """Calls that `codec="auto"` left uncompressed."""
    plain_bytes: int = 0
    """What this rank would have sent without compression (a ring all-reduce)."""
    sent_bytes: int = 0
    seconds: float = 0.0
    """Spent in compressed calls on the CPU; calls on a GPU are not timed, since that would wait for it."""
    predicted_plain_seconds: float = 0.0
    """What `codec="auto"` expects those calls to have taken uncompressed; 0 without it."""
    predicted_calls: int = 0
    _errors: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add_error(self, lost: Tensor, whole: Tensor) -> None:
        """Note the norms of what was lost and of what was to be sent; looked at when the report is read."""
        self._errors.append((lost, whole))
        del self._errors[:-SAMPLES_KEPT]

    @property
    def bytes_saved(self) -> int:
        return self.plain_bytes - self.sent_bytes

    @property
    def seconds_saved(self) -> float | None:
        """Negative where compression cost time; None where nothing says what plain would have taken."""
        if self.predicted_calls == 0:
            return None
        return self.predicted_plain_seconds - self.seconds * self.predicted_calls / max(self.calls, 1)

    @property
    def relative_error(self) -> float | None:
        """What one step loses, as a share of what it was to send (both as 2-norms); feedback returns it later."""
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
