"""Benchmarks: one file a question, one runner, both sides in one run.

    python -m benchmarks            everything, at full size (needs about 8 GB of disk, 12 GB of memory and an hour)
    python -m benchmarks --quick    the same questions on small states, in minutes

A case is data; a question runs its cases in a process of their own and compares sides by turns. What comes out is
written to ``benchmarks/results`` and compared, as ratios alone, with the stored baseline. The test suite runs every
question tiny and untimed.
"""
