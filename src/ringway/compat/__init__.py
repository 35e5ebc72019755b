"""The APIs of other libraries, on top of ringway."""

from __future__ import annotations


def install() -> None:
    """Let `import deepspeed.comm`, and DeepSpeed's engine, use `ringway.compat.deepspeed`.

    Call it before deepspeed is imported: modules that have imported `deepspeed.comm` already would keep it. If
    DeepSpeed is not installed, `import deepspeed` gives a package with nothing but `comm` and `init_distributed`.
    Calling it again changes nothing.
    """
    from ringway.compat.stand_in import serve_deepspeed_comm

    serve_deepspeed_comm()


__all__ = ["install"]
