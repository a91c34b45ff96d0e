"""AMQP 0-9-1: connections and channels that publish with confirms, consume and declare."""
