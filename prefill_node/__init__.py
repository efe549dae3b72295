"""The prefill tier: slack-ordered scheduling inside the engine, and the replica around it."""
