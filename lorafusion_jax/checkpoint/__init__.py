"""What a run leaves on disk: the run folder, states to resume from, PEFT folders, merged models."""
