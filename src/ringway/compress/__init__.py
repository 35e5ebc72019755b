"""Compressed collectives: fewer bytes on the wire, and a report of whether that helped."""

from ringway.compress.codecs.codec import Codec, codec_names, get_codec, register_codec
from ringway.compress.codecs.fp8 import Fp8
from ringway.compress.codecs.int4 import Int4
from ringway.compress.codecs.int8 import Int8
from ringway.compress.codecs.onebit import OneBit
from ringway.compress.codecs.topk import TopK
from ringway.compress.collectives import compressed_all_reduce
from ringway.compress.ddp import ddp_hook
from ringway.compress.feedback import ErrorFeedback, Slot
from ringway.compress.kernels.select import kernels_for
from ringway.compress.optimizers.onebit_adam import OneBitAdam
from ringway.compress.optimizers.onebit_lamb import OneBitLamb
from ringway.compress.optimizers.zero_one_adam import ZeroOneAdam
from ringway.compress.quantized import all_to_all_quant_reduce, quantized_all_gather
from ringway.compress.report import Report

__all__ = [
    "compressed_all_reduce",
    "ErrorFeedback",
    "Slot",
    "Report",
    "Codec",
    "OneBit",
    "Int8",
    "Int4",
    "Fp8",
    "TopK",
    "get_codec",
    "register_codec",
    "codec_names",
    "kernels_for",
    "ddp_hook",
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
    "all_to_all_quant_reduce",
    "quantized_all_gather",
]

for _codec in (OneBit, Int8, Int4, Fp8, TopK):
    register_codec(_codec.name, _codec)
