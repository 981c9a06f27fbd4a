"""The end of a replica's process: as of a crash, so that whoever waits for it is served elsewhere."""

from __future__ import annotations

import logging
import os
from typing import Final

STATUS: Final = 70  # of a process that has ended itself

logger = logging.getLogger("atelier.replica")


class ReplicaEnd:
    """The way to end this process. Callable from any thread."""

    def now(self, reason: str) -> None:
        """End the process at once: nobody may get an answer of ranks that have lost one of them."""
        logger.error("the replica ends: %s", reason)
        logging.shutdown()
        os._exit(STATUS)
