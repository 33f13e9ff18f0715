"""Print the requirements of some of the project's extras, so that a layer of dependencies needs none of its code.

python requirements.py pyproject.toml EXTRA...
"""

import sys
import tomllib
from pathlib import Path

_, pyproject, *extras = sys.argv
known = tomllib.loads(Path(pyproject).read_text())["project"]["optional-dependencies"]
print(*sorted({requirement for extra in extras for requirement in known[extra]}), sep="\n")
