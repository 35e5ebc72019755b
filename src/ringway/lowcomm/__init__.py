"""Low-communication training: sites train alone for many steps, and exchange what they have learned once in a while."""

from ringway.lowcomm.diloco import DiLoCo

__all__ = ["DiLoCo"]
