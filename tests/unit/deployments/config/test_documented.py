"""The page of configuration against the settings."""

import enum
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from deployments.config.admission import AdmissionConfig, FairnessConfig, TenantLimitsConfig
from deployments.config.degraded import DegradedConfig
from deployments.config.keys import KeyConfig
from deployments.config.limits import LimitsConfig
from deployments.config.lora import LoraConfig
from deployments.config.models import ModelSection
from deployments.config.monitor import MonitorConfig
from deployments.config.preemption import PreemptionConfig
from deployments.config.pressure import PressureConfig
from deployments.config.replicas import AutoscalingConfig, KVTransferConfig, PoolConfig
from deployments.config.router import RouterSection
from deployments.config.settings import SlackServeConfig
from deployments.config.tiers import TierConfig

PAGE = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()
SECTIONS = {
    "Top level": [SlackServeConfig],
    "`tiers`": [TierConfig],
    "`prefill` and `decode`": [PoolConfig],
    "`autoscaling`": [AutoscalingConfig],
    "`preemption`": [PreemptionConfig],
    "`fairness`": [FairnessConfig],
    "`admission`": [AdmissionConfig],
    "`kv_transfer`": [KVTransferConfig],
    "`router`": [RouterSection],
    "`monitor`": [MonitorConfig],
    "`degraded`": [DegradedConfig],
    "`pressure`": [PressureConfig],
    "`lora`": [LoraConfig],
    "`models`": [ModelSection],
    "`limits`": [LimitsConfig],
    "`api_keys`": [KeyConfig, TenantLimitsConfig],
}


def documented(heading):
    """The row of each key in the tables of keys of one section of docs/configuration.md."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = [block.strip() for block in text.split("\n\n")]
    rows = [row for block in blocks if block.startswith("| Key") for row in block.splitlines()[2:]]
    return {key: row for row in rows for key in re.findall(r"`(\w+)", row.split("|")[1])}


def choices(annotation):
    """The words among which a key of this type chooses; none for any other type."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {member.value for member in annotation}
    return set(get_args(annotation)) if get_origin(annotation) is Literal else set()


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_documented_with_all_its_choices(heading):
    fields = {name: field for section in SECTIONS[heading] for name, field in section.model_fields.items()}
    rows = documented(heading)
    assert set(rows) == set(fields)
    for name, field in fields.items():
        missing = {choice for choice in choices(field.annotation) if f"`{choice}`" not in rows[name]}
        assert not missing, f"{name}: {missing}"
