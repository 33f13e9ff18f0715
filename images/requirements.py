"""Print the requirements of extras of the project, so that an image's layer of dependencies does not need its code.

python requirements.py pyproject.toml EXTRA...
"""

import sys
import tomllib
from pathlib import Path

_, pyproject, *extras = sys.argv
known = tomllib.loads(Path(pyproject).read_text())["project"]["optional-dependencies"]
print(*sorted({requirement for extra in extras for requirement in known[extra]}), sep="\n")
