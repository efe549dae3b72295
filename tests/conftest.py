"""Settings of all tests."""

import os

from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # several share the cores; PyTorch reads it when it is loaded
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is; tests that are about time measure it themselves.
settings.register_profile("slackserve", deadline=None)
settings.load_profile("slackserve")
