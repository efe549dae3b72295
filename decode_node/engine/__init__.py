"""The EngineCore process of a decode replica that acts when memory or pace runs short."""
