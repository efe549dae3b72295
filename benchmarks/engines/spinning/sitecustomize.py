"""Python runs this at start where this folder is on its path: NIXL's progress threads spin."""  # noqa: INP001 - no package

import importlib.util
import sys

if importlib.util.find_spec("kv_transfer") is not None and "kv_transfer.nixl_agent" not in sys.modules:
    from kv_transfer import nixl_agent

    nixl_agent._DELAY_US = 0  # type: ignore[misc] # noqa: SLF001 - a benchmark's arm, no setting of the product
