"""`slackserve bench`."""
