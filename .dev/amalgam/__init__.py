"""Distils text classifiers into one student with all of their labels: `from amalgam import Experiment`.

Importing this module loads nothing else.
"""
# This file is not at the repository's root, which would make a package of the folder of the clone. The links next to it
# give editable installs the folders that the wheel has.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from amalgam.pipeline.errors import AmalgamError
    from amalgam.stages.app.api import Experiment

__version__ = "0.1.0"

__all__ = ["AmalgamError", "Experiment", "__version__"]

WHERE = {"AmalgamError": "amalgam.pipeline.errors", "Experiment": "amalgam.stages.app.api"}


def __getattr__(name: str) -> object:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
