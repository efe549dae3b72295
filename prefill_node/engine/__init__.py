"""The EngineCore process: the scheduler that suspends and resumes steps."""
