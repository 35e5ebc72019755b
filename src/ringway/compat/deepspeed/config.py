"""deepspeed.comm.config: the block `comms_logger` as an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringway.config import resolve


class CommsLoggerConfig:
    """The block's keys as attributes, checked as ringway checks them."""

    def __init__(self, **keys: Any) -> None:
        found = resolve({"comms_logger": keys}, environ={}).comms_logger
        self.enabled, self.prof_all, self.verbose = found.enabled, found.prof_all, found.verbose
        self.debug, self.prof_ops = found.debug, list(found.prof_ops)


class DeepSpeedCommsConfig:
    """What a whole configuration says about communication. `comms_logger_enabled`: the block is there."""

    comms_logger: CommsLoggerConfig

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = "comms_logger" in ds_config
        if self.comms_logger_enabled:
            self.comms_logger = CommsLoggerConfig(**ds_config["comms_logger"])
