"""How many pulls a decode engine's scheduler has seen done, on its way to the metrics.

Travels with vLLM's statistics of a step, as the figures of `telemetry.pressure` do. VLLM's count the reads of
single ranks, which do not say whether another rank's of the same request has failed.
"""

from typing import Final

PULLS_KEY: Final = "slackserve_pulls"
"""Where their number is among the connector's statistics."""
