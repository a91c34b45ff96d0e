"""Where Spark finds the data source `delayed_messages`: it imports every module whose name begins with `pyspark_`."""

from delayline.spark.datasource import DelayedMessages as DefaultSource

__all__ = ["DefaultSource"]
