"""From "package.module:function" to the function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from ._wire import MAIN_SCRIPT


def import_target(target: str) -> Any:
    """The function behind "package.module:function" or "file:/path.py:function". Raises ImportError, AttributeError."""
    module_name, _, name = target.rpartition(":")
    if not module_name.startswith("file:"):
        return getattr(importlib.import_module(module_name), name)
    spec = importlib.util.spec_from_file_location(MAIN_SCRIPT, module_name.removeprefix("file:"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN_SCRIPT] = module  # not "__main__": the script's main block must not run again
    spec.loader.exec_module(module)
    return getattr(module, name)
