"""`slackserve top`."""
