"""Logging of every process: one line per record on standard error."""

from __future__ import annotations

import logging


def setup_logging(level: str, process: str) -> None:
    """`level` is one of `ServerArgs.log_level`. Prompts and outputs are logged at no level but debug, keys at none."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s.%(msecs)03d %(levelname)-7s {process}: %(message)s", datefmt="%H:%M:%S", force=True
    )
    # Libraries that report every connection at info.
    for name in ("httpx", "httpcore", "huggingface_hub", "filelock", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
