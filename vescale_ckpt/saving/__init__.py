"""Saving: the story of one save, from the caller's state to a committed snapshot."""
