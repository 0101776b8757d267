"""samu_lm: training framework for recurrent language models (SAMU and RG-LRU) on packed documents."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("samu-lm")
except PackageNotFoundError:  # a source tree that is on the path without being installed
    __version__ = "0.0.0"
