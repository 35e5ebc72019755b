"""Low-communication training: sites train alone for many steps, and exchange what they have learned once in a while."""

from ringway.lowcomm.diloco import DiLoCo
from ringway.lowcomm.sparseloco import SparseLoCo

__all__ = ["DiLoCo", "SparseLoCo"]
