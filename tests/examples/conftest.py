"""The examples are scripts that import their neighbours: put their folders where Python looks for such."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "nanogpt"))
