"""A folder of Parquet files that all machines of a job reach: local, or on a file system of pyarrow."""

from __future__ import annotations

import contextlib
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from delayline.errors import BackendUnusable, ConfigurationError, MissingExtra
from delayline.masking import masked

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Hadoop's names of S3, as Spark users write them.
S3: Final = re.compile(r"^s3[an]://")


class SharedFolder:
    """A folder; pickled to tasks.

    Args:
        path: a local folder, or a URI of pyarrow's: file, s3, gs, hdfs, abfss.

    Raises:
        ConfigurationError: The path or URI is not valid.
        MissingExtra: pyarrow is not installed.
    """

    #: The setting that names it, and what it is for.
    setting: ClassVar[str]
    purpose: ClassVar[str]

    def __init__(self, path: str) -> None:
        if find_spec("pyarrow") is None:
            raise MissingExtra("spark", self.purpose)
        self.path: str = path if "://" in path else str(Path(path.removeprefix("file:")).absolute())
        _ = self._place

    @property
    def uri(self) -> str:
        """The folder as libraries outside of Arrow take it."""
        return S3.sub("s3://", self.path)

    def settle(self, address: str) -> None:
        """Let a file that is complete outlast a power cut, where it is local."""
        from pyarrow.fs import LocalFileSystem

        system, _ = self._place
        if isinstance(system, LocalFileSystem):
            file = Path(address)
            for path in (file, file.parent, file.parent.parent):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_kept")}

    @property
    def _place(self) -> tuple[Any, str]:
        """The file system, and the folder there."""
        from pyarrow import ArrowInvalid
        from pyarrow.fs import FileSystem, LocalFileSystem

        if "://" not in self.path:
            return LocalFileSystem(), self.path
        kept: tuple[Any, str] | None = self.__dict__.get("_kept_place")
        if kept is None:
            try:
                system, root = FileSystem.from_uri(self.uri)
            except (ArrowInvalid, OSError, NotImplementedError) as error:
                raise ConfigurationError(
                    f"{self.setting}={without_secrets(self.path)!r} cannot be used: {without_secrets(str(error))}. "
                    "Give a folder, or a URI that begins with file, s3, gs, hdfs or abfss"
                ) from None
            kept = self.__dict__["_kept_place"] = system, root.rstrip("/")
        return kept

    @contextlib.contextmanager
    def _plainly(self, what: str) -> Iterator[None]:
        from pyarrow import ArrowException

        try:
            yield
        except FileNotFoundError as error:
            raise BackendUnusable(
                f"cannot {what}: {error}. Does {self.setting}={without_secrets(self.path)!r} name the folder of "
                f"{self.purpose}?"
            ) from error
        except (OSError, ArrowException) as error:
            raise BackendUnusable(
                f"cannot {what}: {without_secrets(str(error))}. Check that the folder can be read and written"
            ) from error


def without_secrets(text: str) -> str:
    """Return the text without keys, their names and passwords of a URI in it."""
    return re.sub(r"//[^/@\s]*@", "//***@", masked(text))
