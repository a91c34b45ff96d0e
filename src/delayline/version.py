"""The version of this package, as it was installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("delayline")
except PackageNotFoundError:  # a folder on sys.path, which nothing has installed
    __version__ = "0+unknown"
