"""Who is told what goes on: the router, the SLO monitor."""
