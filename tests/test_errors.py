"""The errors as values: they cross processes, with everything they know."""

from __future__ import annotations

import copy
import pickle

import pytest

from ringway import errors
from ringway.groups.health import CallTooEarly
from ringway.testing.conformance import ConformanceFailed, Report
from ringway.testing.pool import Outcome, RanksFailed

EXAMPLES: list[BaseException] = [
    errors.RingwayError("plain"),
    errors.ConfigError("no such key", key="timeout", source="a file"),
    errors.DiscoveryError("half a launcher", source="torchrun", seen={"RANK": "1"}),
    errors.RendezvousError("rank 1 is missing", arrived={0: "here"}, missing=[1]),
    errors.Tampered("a stranger wrote", what="key"),
    errors.BackendUnavailable("mpi", "mpi4py is not installed", remedy="Install it"),
    errors.UsageError("wrong"),
    errors.ObjectError("too large", sender=3),
    errors.NotFinite("NaN", rank=1, key="layer"),
    errors.CollectiveMismatch("different", sides={0: "all_reduce", 1: "barrier"}, sequence=7),
    errors.PeerLost("gone", rank=1, host="h", pid=5, signal=9),
    errors.CommTimeout("late", op="all_reduce", sequence=1, waited=2.5, missing=[1]),
    CallTooEarly("a handler came first"),
    RanksFailed("function", [Outcome(0, "raised", detail="why")]),
    ConformanceFailed(Report()),
]


def test_there_is_an_example_of_every_public_error() -> None:
    public = {getattr(errors, name) for name in errors.__all__}
    assert public <= {type(example) for example in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickle_and_copy(error: BaseException) -> None:
    error.__dict__["__notes__"] = ["a note"]
    again = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in (*again, copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert (str(other), other.args) == (str(error), error.args)
        assert other.__dict__.keys() == error.__dict__.keys()
        assert repr(other.__dict__) == repr(error.__dict__)
        with pytest.raises(type(error)):
            raise other
