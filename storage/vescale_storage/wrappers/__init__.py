"""Back ends around back ends: retries, counts, faults and latency, each apart so that any can be left out."""
