"""What a run leaves on disk: the run folder and states to resume from; the files of its base and of warm starts."""
