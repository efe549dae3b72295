"""How SlackServe is put on a machine: the command line, the models it serves, and the Ray deployments."""
