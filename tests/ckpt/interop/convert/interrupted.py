"""A process that converts and dies in the middle: ``python interrupted.py SOURCE TARGET FORMAT BYTES``."""

from __future__ import annotations

import os
import sys

from vescale_ckpt.interop.convert import convert

if __name__ == "__main__":
    source, target, target_format, limit = sys.argv[1:]
    left = [int(limit)]

    def advance(num_bytes: int) -> None:
        left[0] -= num_bytes
        if left[0] < 0:
            os._exit(9)

    convert(source, target, target_format=target_format, progress=advance, budget_bytes=32 << 20)
    print("ended")
