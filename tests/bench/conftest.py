import sys
from pathlib import Path

# Scripts of benchmarks/ import one another as they do when they are run.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
