"""NumPy, Polars, PyArrow and torch, each loaded at its first use: `--help` and `plan` start without them.

Files that `plan` reads import the libraries from here; files that compute anyway import them as usual.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["np", "pa", "pc", "pl", "pq", "torch"]


class LazyModule(ModuleType):
    """Loads a module at the first access to one of its attributes."""

    _loaded: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if self._loaded is None:
            self._loaded = import_module(self.__name__)
        return getattr(self._loaded, name)


if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import torch
else:
    np, pl, torch = LazyModule("numpy"), LazyModule("polars"), LazyModule("torch")
    pa, pc, pq = (LazyModule(name) for name in ("pyarrow", "pyarrow.compute", "pyarrow.parquet"))
