"""What Ray has names for, asked before anything starts: kinds of GPU and labels of nodes.

Ray refuses what it does not know in the middle of the application's start, in its own words.
"""

from __future__ import annotations

from ray._private.label_utils import validate_label_selector
from ray.util.accelerators import accelerators

from deployments.config import ConfigError
from deployments.config.settings import SlackServeConfig
from slo.files.strict_yaml import nearest


def check_ray_names(config: SlackServeConfig) -> None:
    """Refuse kinds of GPU and labels that Ray does not take.

    Raises:
        ConfigError: There is one.
    """
    kinds = {"accelerator_type": config.accelerator_type}
    labels = {"node_labels": config.node_labels}
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        kinds[f"{name}.accelerator_type"] = pool.accelerator_type
        labels[f"{name}.node_labels"] = pool.node_labels
    known = {value for name, value in vars(accelerators).items() if name[0].isupper()}
    for key, kind in kinds.items():
        if kind is not None and kind not in known:
            alike = {each.lower(): each for each in known}.get(kind.lower())
            near = f"did you mean {alike!r}?" if alike else nearest(kind, known, "give one as H100 or L4")
            msg = (
                f"{key}: Ray knows no {kind!r}; {near} (what it has no name for is left out, or chosen by "
                "node_labels, as ray.io/accelerator-type)"
            )
            raise ConfigError(msg)
    for key, given in labels.items():
        if (problem := validate_label_selector(given)) is not None:
            raise ConfigError(f"{key}: {problem}")
