"""One job of scheduling: which way its rows go, by the target, and what became of them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from delayline.bulk.runs import Committed
from delayline.clock import SystemClock, from_microseconds
from delayline.errors import ConfigurationError
from delayline.spark.broker_sink import BrokerSink
from delayline.spark.cold_tier import ColdTier, schedule_in_tiers
from delayline.spark.columns import content_type, prepared
from delayline.spark.headers import HEADER_ALLOWANCE, SendHeaders
from delayline.spark.options import FORMAT, StoreOptions
from delayline.spark.placement import Handing
from delayline.spark.sources import HIDDEN
from delayline.spark.validation import Validator

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from pyspark.sql import DataFrame

    from delayline.spark.columns import Columns
    from delayline.spark.schedule import JobTarget

CONNECTION: Final = "delayline schedule"


class Done(NamedTuple):
    """The result of a job, and the data for listing its rejected rows."""

    run: str
    stored: int
    held: int
    sent: int
    duplicates: int
    rejected: int
    repeated: bool
    now: datetime
    validator: Validator


@dataclass(frozen=True)
class Job:
    """How rows are scheduled, whatever they are."""

    target: JobTarget
    columns: Columns
    on_conflict: str
    hot_horizon: timedelta

    def check(self) -> None:
        """Raise ConfigurationError for options that the target does not support."""
        if self.target.broker is not None and self.on_conflict != "ignore":
            raise ConfigurationError(
                f"on_conflict={self.on_conflict!r}: delay levels cannot be searched for ids. Use 'ignore'; ids of the "
                "same job, and those in the store, are compared"
            )

    def run(self, rows: DataFrame, run: str | None, *, batch: int = 0) -> Done:
        """Schedule the rows. batch: of a stream. Blocks. Raises DelaylineError."""
        self.check()
        if self.target.broker is not None:
            return self._with_broker(rows, self.target.broker, run, batch)
        store = StoreOptions.of(self.target.options)
        staging, name = store.staging(), run or uuid.uuid4().hex
        now, largest = staging.now(), staging.largest_message
        messages = prepared(rows, self.columns, now).drop(*HIDDEN)
        sender = SendHeaders(self.target.sender, content_type(rows, self.columns), now)
        before, held = staging.committed(name, batch), 0
        if self.target.cold_tier is not None:
            tier = ColdTier(self.target.options, self.target.cold_tier)
            how = {"on_conflict": self.on_conflict, "run": name}
            far_from = now + self.hot_horizon
            stored, held = schedule_in_tiers(messages, tier, sender, far_from=far_from, batch=batch, **how)
        else:
            if before is None:
                how = {"onConflict": self.on_conflict, "invalid": "skip", "runId": name}
                options = {**self.target.options, **how, **sender.options}
                messages.write.format(FORMAT).mode("append").options(**options).save()
            stored = before or staging.committed(name) or Committed(0)
        counts = (stored.stored, held, 0, stored.duplicates, stored.rejected)
        return Done(name, *counts, before is not None, now, Validator(largest - HEADER_ALLOWANCE))

    def _with_broker(self, rows: DataFrame, broker: str, run: str | None, batch: int) -> Done:
        target, store = self.target, self.target.store
        if store is None and run is not None and not run.startswith("stream "):
            raise ConfigurationError(
                f"run={run!r} is remembered in a database: JobTarget('postgresql://...', delay_levels='amqp://...')"
            )
        tier = None if store is None or target.cold_tier is None else ColdTier(target.options, target.cold_tier)
        now = SystemClock().now() if store is None else store.staging().now()
        sender = SendHeaders(target.sender, content_type(rows, self.columns), now)
        handing = Handing(BrokerSink(broker, CONNECTION), sender, store, tier)
        done = handing.run(rows, self.columns, run=run, batch=batch, horizon=self.hot_horizon, now=now)
        handed = done.handed
        counts = (done.stored, done.held, handed.sent, handed.duplicates, handed.rejected)
        return Done(run or uuid.uuid4().hex, *counts, done.repeated, from_microseconds(done.facts.now), done.validator)
