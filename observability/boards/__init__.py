"""What the dashboards show."""

from observability.boards import fleet, preemption, request_path, slo_overview

BOARDS = (slo_overview.BOARD, request_path.BOARD, preemption.BOARD, fleet.BOARD)
