"""Collection: finding what nothing refers to any more, writing it down, waiting, and deleting it."""
