"""An engine does not outlive its replica.

vLLM's EngineCore notices nothing when the process that started it is killed, and would hold its memory, its
ports and its workers for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

_GRACE_S = 10.0


def end_with_parent() -> None:
    """End this process when its parent ends: politely at first, so that it can stop its own children.

    Does nothing in a process that multiprocessing has not started.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(1)

    threading.Thread(target=follow, name="end-with-parent", daemon=True).start()
