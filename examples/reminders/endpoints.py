"""Two endpoints on one SQLite file: `reminders` sends and dispatches, `customers` receives.

delayline run endpoints:dispatcher
delayline run endpoints:customers
"""

from datetime import UTC, datetime

from delayline import Endpoint, Headers, Message, MessageContext
from delayline.message import from_wire_time

# No handlers: this process only moves what is due to the queue of `customers`. Start as many as you like.
dispatcher = Endpoint.from_settings("reminders")

customers = Endpoint.from_settings("customers")


@customers.handler
async def remind(message: Message, context: MessageContext) -> None:
    """Print the message and its lateness."""
    del context
    late = datetime.now(UTC) - from_wire_time(message.headers[Headers.DELIVER_AT])
    print(f"{message.id}: {message.text} ({late.total_seconds() * 1000:.0f} ms late)", flush=True)
