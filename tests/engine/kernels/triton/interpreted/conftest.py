"""Triton's kernels without a GPU: the interpreter runs them on tensors of the CPU, one program after another.

It is chosen when a kernel is decorated, so these tests have a process of their own (`../test_interpreted.py`).
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]
