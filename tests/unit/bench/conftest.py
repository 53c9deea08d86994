"""The benchmarks are scripts in a folder of their own: their modules import each other from there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
