"""The replica process: the Serve deployment, its governor, its reports."""
