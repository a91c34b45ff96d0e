"""`delayline.contrib.django` in a project: settings, migrations, a sender, handlers, `manage.py delayline`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.eventually import eventually
from tests.integration.test_django import django_at

if TYPE_CHECKING:
    from tests.servers.postgresql import PostgresqlServer

SETTINGS = """
    import json, os
    import pymysql
    pymysql.install_as_MySQLdb()
    SECRET_KEY = "only for tests"
    DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
    INSTALLED_APPS = ["delayline.contrib.django", "orders"]
    USE_TZ = True
    DATABASES = {"default": json.loads(os.environ["DATABASE"])}
    DELAYLINE = json.loads(os.environ["SETTINGS"])
"""
MODELS = """
    from django.db import models

    class Order(models.Model):
        number = models.IntegerField(unique=True)
        reminders = models.IntegerField(default=0)
"""
HANDLERS = """
    import threading
    from dataclasses import dataclass
    from delayline import MessageContext
    from delayline.contrib.django import endpoint
    from orders.models import Order

    @dataclass
    class Remind:
        number: int

    @endpoint.handles(Remind)
    def remind(message: Remind, context: MessageContext) -> None:
        if message.number == 100:
            context.transaction("default")
        order = Order.objects.get(number=message.number)
        order.reminders += 1
        order.save()
"""
MANAGE = """
    import os, sys
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    from django.core.management import execute_from_command_line
    execute_from_command_line(sys.argv)
"""
BEGIN = """
    import os
    os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    import django
    django.setup()
    from datetime import timedelta
    from django.db import connection, transaction
    from delayline.contrib.django import sender
    from orders.handlers import Remind
    from orders.models import Order
"""


class Project:
    """A project of Django in a folder.

    Args:
        folder: Where it is.
        database: Its entry of DATABASES.
        settings: Its DELAYLINE.
    """

    def __init__(self, folder: Path, database: dict[str, object], settings: dict[str, object]) -> None:
        self.folder = folder
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "DATABASE": json.dumps(database),
            "SETTINGS": json.dumps(settings),
        }
        files = {"shop/settings.py": SETTINGS, "orders/models.py": MODELS, "orders/handlers.py": HANDLERS}
        for name, text in (files | {"manage.py": MANAGE, "shop/__init__.py": "", "orders/__init__.py": ""}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(textwrap.dedent(text))

    def manage(self, *words: str, code: int = 0) -> str:
        """Run `manage.py` and return what it has printed."""
        done = subprocess.run(
            [sys.executable, "manage.py", *words], cwd=self.folder, env=self.environment, capture_output=True,
            text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, code: str) -> str:
        """Run code in a process of the project, as a view does, and return what it has printed."""
        script = textwrap.dedent(BEGIN) + textwrap.dedent(code)
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def reminded(self, number: int, times: int) -> None:
        """Wait until an order was reminded of so often, or oftener; what the worker has logged says why not."""
        try:
            eventually(lambda: (self.reminders(number) or 0) >= times, patience=90)
        except AssertionError as error:
            raise AssertionError(f"{error}; the worker: {(self.folder / 'worker.log').read_text()}") from error

    def worker(self, *words: str) -> subprocess.Popen[str]:
        """Start `manage.py delayline run`."""
        with (self.folder / "worker.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "manage.py", "delayline", "run", *words], cwd=self.folder, env=self.environment,
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def messages(self, queue: str) -> int:
        """Return how many messages are in a queue."""
        queues = json.loads(self.manage("delayline", "queues", "--json"))["queues"]
        return int(next(found["messages"] for found in queues if found["queue"] == queue))

    def reminders(self, number: int) -> int | None:
        """Return how often an order was reminded of; None without the order."""
        printed = self.run(f"print(*Order.objects.filter(number={number}).values_list('reminders', flat=True))").strip()
        return int(printed) if printed else None


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    place = request.param
    url = f"sqlite:///{tmp_path}/shop.db" if place == "sqlite" else request.getfixturevalue(f"{place}_url")
    project = Project(tmp_path, django_at(url), {"ENDPOINT": "shop", "QUEUES": ["mails"]})
    project.manage("migrate", "--run-syncdb")
    return project


def ended(worker: subprocess.Popen[str]) -> str:
    """End the worker by SIGTERM and return what it has printed."""
    worker.send_signal(signal.SIGTERM)
    printed, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0, printed
    return printed


def test_orders_are_reminded_of_in_djangos_transactions(project: Project) -> None:
    # Given orders that are placed with their reminders, one of which is rolled back, and one paid
    printed = project.run(
        """
        def place(number, fails=False):
            with transaction.atomic():
                Order.objects.create(number=number)
                sender().send("shop", Remind(number), delay=timedelta(seconds=1), message_id=f"remind-{number}")
                transaction.set_rollback(fails)

        place(17)  # the first send starts the sender, inside of atomic()
        place(18, fails=True)
        place(19)
        with transaction.atomic():
            print(sender().delayed.cancel("remind-19"))
        with transaction.atomic():
            print(sender().delayed.cancel("remind-17"))
            transaction.set_rollback(True)
        sender().send("mails", "outside of a transaction")
        place(100)
        """
    )
    assert printed.split() == ["done", "done"]
    # When a worker runs
    worker = project.worker()
    try:
        project.reminded(17, 1)
        project.reminded(100, 1)
    finally:
        printed = ended(worker)
    # Then each committed order is reminded of, and no other
    assert "shop runs: TRANSACTION_SCOPE" in printed
    assert "1 handler" in printed
    assert [project.reminders(number) for number in (17, 100, 18, 19)] == [1, 1, None, 0]
    assert project.messages("mails") == 1


def test_commands_know_the_settings_of_the_project(project: Project) -> None:
    """Also through `call_command`; errors have delayline's exit codes."""
    assert "Run Endpoint objects" in project.manage("delayline", "run", "--help")
    assert "dashboard" in project.manage("help", "delayline")
    assert json.loads(project.manage("delayline", "pending", "--json"))["pending"] == []
    assert "no pending message has this id" in project.manage("delayline", "cancel", "nothing", code=1)
    project.manage("delayline", "pending", "--limit", "none", code=2)
    printed = project.run(
        """
        from django.core.management import CommandError, call_command
        call_command("delayline", "pending", "--json")
        try:
            call_command("delayline", "cancel", "nothing")
        except CommandError as error:
            print(error.returncode)
        """
    )
    assert printed.strip().endswith("1")


def test_a_worker_goes_on_after_the_database_was_away(tmp_path: Path, postgresql: PostgresqlServer) -> None:
    """Handlers that use models without a transaction of delayline's get connections that work."""
    project = Project(tmp_path, django_at(postgresql.new_database()), {"ENDPOINT": "shop", "CONCURRENCY": 1})
    project.manage("migrate", "--run-syncdb")
    remind = "Order.objects.get_or_create(number=17); sender().send('shop', Remind(17))"
    worker = project.worker()
    try:
        project.run(remind)
        project.reminded(17, 1)
        with postgresql.administrator() as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        project.run(remind)
        project.reminded(17, 2)
    finally:
        ended(worker)


def test_messages_go_to_rabbitmq_through_an_outbox_beside_the_rows(
    tmp_path: Path, postgresql_url: str, rabbitmq_url: str
) -> None:
    project = Project(tmp_path, django_at(postgresql_url), {"ENDPOINT": "shop", "URL": rabbitmq_url})
    project.manage("migrate", "--run-syncdb")
    project.manage("delayline", "setup", "--without-management")
    project.run(
        """
        for number, fails in ((17, False), (18, True)):
            with transaction.atomic():
                Order.objects.create(number=number)
                sender().send("shop", Remind(number), delay=timedelta(seconds=1))
                transaction.set_rollback(fails)
        """
    )
    worker = project.worker()
    try:
        project.reminded(17, 1)
    finally:
        ended(worker)
    assert project.reminders(18) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_server_may_fork_after_the_first_send(project: Project) -> None:
    """As one that loads the application and sends once before it forks its workers."""
    printed = project.run(
        """
        sender().send("mails", "before")
        if (child := os.fork()) == 0:
            connection.close()
            sender().send("mails", "in the child")
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        sender().send("mails", "after")
        """
    )
    assert printed.strip() == "0"
    assert project.messages("mails") == 3


def test_tests_of_the_project_have_a_database_of_their_own(project: Project) -> None:
    """What is sent in a TestCase is gone with its transaction."""
    (project.folder / "orders" / "tests.py").write_text(
        textwrap.dedent(
            """
            from datetime import timedelta
            from django.test import TestCase
            from delayline.contrib.django import sender
            from orders.handlers import Remind, remind
            from orders.models import Order

            class OrderTests(TestCase):
                def test_sends(self):
                    Order.objects.create(number=17)
                    sender().send("shop", Remind(17), delay=timedelta(days=1), message_id="remind-17")
                    self.assertEqual(str(sender().delayed.cancel("remind-17")), "done")

                def test_sends_again(self):
                    self.assertEqual(sender().delayed.pending(), [])
            """
        )
    )
    database = json.loads(project.environment["DATABASE"])
    database["TEST"] = {"NAME": str(project.folder / "test.db") if "sqlite" in database["ENGINE"] else "test_of_django"}
    project.environment["DATABASE"] = json.dumps(database)
    assert "OK" in project.manage("test", "--noinput")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, 'names no endpoint: write DELAYLINE = {"ENDPOINT": "shop"}'),
        ([], "must be a dict"),
        ({"ENDPOINT": "shop", "CONCURRENC": 3}, "unknown key 'CONCURRENC'; did you mean 'CONCURRENCY'?"),
        ({"ENDPOINT": "shop", "CONCURRENCY": 0}, "concurrency = 0"),
        ({"ENDPOINT": "shop", "DATABASE": "orders"}, "'orders', which DATABASES does not have"),
        ({"ENDPOINT": "shop", "QUEUES": "mails"}, "must be a list of names"),
        ({"ENDPOINT": "shop", "URL": "nonsense://x"}, "The supported schemes are"),
    ],
)
def test_wrong_settings_are_found_by_check(tmp_path: Path, settings: dict[str, object], text: str) -> None:
    project = Project(tmp_path, django_at(f"sqlite:///{tmp_path}/shop.db"), settings)
    assert text in project.manage("check", code=1)


def test_a_database_in_memory_is_refused(tmp_path: Path) -> None:
    project = Project(tmp_path, {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}, {"ENDPOINT": "shop"})
    assert 'DATABASES: {..., "TEST": {"NAME": "test.sqlite3"}}' in project.manage("check", code=1)
