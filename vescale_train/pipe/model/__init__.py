"""A model in parts: its units, what flows between them, and running some of them where the others are not."""
