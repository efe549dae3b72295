"""Who is admitted to a fleet that cannot serve everybody."""
