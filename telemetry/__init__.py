"""What every process reports: the catalogue of metrics, their instruments, structured logs."""
