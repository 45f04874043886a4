"""Loading: the story of one load, from a snapshot to the caller's state, on any layout."""
