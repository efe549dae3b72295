"""Models by name: the embedded one, directories, hub ids."""
