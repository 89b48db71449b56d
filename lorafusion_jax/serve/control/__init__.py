"""The server's side of training: checks of jobs, workers and their leases, placements."""
