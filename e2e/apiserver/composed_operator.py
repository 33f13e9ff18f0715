"""``stoker operator`` for endpoints of two workloads, each with two StatefulSets; tests start this program."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.stateful_sets import TWO_PAIRS

from stoker_operator.cli.operator import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], TWO_PAIRS))
