"""Strict Gin: everything that the user writes is found, typed and read, or refused with its file and line.

The syntax and the registry of configurables are gin-config's; finding files, includes, locations and all checks are
done here, since Gin itself accepts misspelt macros, unread bindings and values of any type in silence.  Gin's state is
global: `load` replaces it.  The order of use is `load`, `check_types`, `build` of the root object, `check_all_read`,
`resolved`.  Values that the program passes to a configurable itself are no configuration and appear nowhere.
"""

from mtf_experiments.config.checking import check_types
from mtf_experiments.config.files import PARAM, find, gin_folders
from mtf_experiments.config.names import RENAMED
from mtf_experiments.config.reading import build, check_all_read
from mtf_experiments.config.state import clear, load, loaded, locate
from mtf_experiments.config.text import diff, flatten, macros, resolved
from mtf_experiments.config.version import SCHEMA_VERSION

__all__ = [
    "PARAM",
    "RENAMED",
    "SCHEMA_VERSION",
    "build",
    "check_all_read",
    "check_types",
    "clear",
    "diff",
    "find",
    "flatten",
    "gin_folders",
    "load",
    "loaded",
    "locate",
    "macros",
    "resolved",
]
