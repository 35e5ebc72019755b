"""The ranks of one group, by their global numbers and by their place in the group."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from ringway.errors import UsageError


class Members:
    """Translates torch's two spellings of a rank: global (`src`) and the group's own (`group_src`)."""

    def __init__(self, group: str, ranks: Sequence[int]) -> None:
        self._group = group
        self.ranks = list(ranks)
        self._place = {rank: place for place, rank in enumerate(self.ranks)}

    def place(self, name: str, rank: int | None, group_rank: int | None, default: int | None = None) -> int:
        """The rank in the group, from a global rank or from the group's own; `name` is the parameter's, for errors."""
        if group_rank is None:
            if type(rank) is int and (place := self._place.get(rank)) is not None:
                return place
        elif rank is None and type(group_rank) is int and 0 <= group_rank < len(self.ranks):
            return group_rank
        if rank is not None and group_rank is not None:
            raise UsageError(f"pass {name} or group_{name}, not both")
        if group_rank is None and rank is None:
            rank = default
        try:
            if group_rank is not None:
                place = index(group_rank)
                if not 0 <= place < len(self.ranks):
                    raise UsageError(
                        f"group_{name}={group_rank} is outside the group's ranks 0 to {len(self.ranks) - 1}"
                    )
                return place
            if rank is None:
                raise UsageError(f"pass {name} (a global rank) or group_{name} (the group's own)")
            found = self._place.get(index(rank))
        except TypeError:
            given = f"{name}={rank!r}" if group_rank is None else f"group_{name}={group_rank!r}"
            raise UsageError(f"{given} is not a rank: ranks are integers") from None
        if found is None:
            raise UsageError(f"{name}={rank} is not a rank of the group {self._group}, which has {self.ranks}")
        return found
