"""`slackserve timeline`."""
