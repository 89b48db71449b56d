"""Jobs, keys, data sets and events of a service, in SQLite. Every change is one transaction."""
