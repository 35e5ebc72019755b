"""Compressed collectives."""

from ringway.compress.codec import Codec, get_codec, register_codec
from ringway.compress.fp8 import Fp8
from ringway.compress.int4 import Int4
from ringway.compress.int8 import Int8
from ringway.compress.onebit import OneBit

for _codec in (OneBit, Int8, Int4, Fp8):
    register_codec(_codec.name, _codec)
