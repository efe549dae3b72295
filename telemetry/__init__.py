"""What every process says of itself: metrics, logs, spans, its engine's statistics, reports to the others."""
