"""Chat templates: compiled in a sandbox with limits, rendered with marks that say where each message is."""
