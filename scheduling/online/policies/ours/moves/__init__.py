"""One move per file. A move changes the draft of a search if that pays off, and returns whether it did."""
