"""The core of a monitor that has just started."""

import pytest
from monitor_reports import SETTINGS

from slo.monitor.core import MonitorCore


@pytest.fixture
def core():
    return MonitorCore(SETTINGS, 0.0)
