"""`slackserve simulate`."""
