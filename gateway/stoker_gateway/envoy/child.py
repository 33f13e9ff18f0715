"""``python -m stoker_gateway.envoy.child PARENT PROGRAM …``: executes a program that the kernel kills when its parent,
the process PARENT, ends."""

from __future__ import annotations

import os
import sys

from stoker_common.subprocesses.lifeline import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))  # the parent-death signal stays set across exec
    os.execv(sys.argv[2], sys.argv[2:])
