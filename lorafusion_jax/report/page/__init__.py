"""The report of runs: one HTML page with curves, a sortable table, what limits speed, and the timeline."""
