"""A deployment on this machine: start, cores, environment, finding it again."""
