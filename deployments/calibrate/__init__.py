"""`slackserve calibrate`."""
