"""Makes the package `release` importable; its commands run in the repository's root."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
