"""Settings of all tests."""

from hypothesis import settings

# How long an example takes says how busy the machine is; tests that are about time measure it themselves.
settings.register_profile("slackserve", deadline=None)
settings.load_profile("slackserve")
