"""Prometheus' own checks, where it is installed."""

import shutil

import pytest

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here; Debian's package prometheus has it"
)
