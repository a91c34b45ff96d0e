"""Two endpoints on one SQLite file: `reminders` sends and dispatches, `customers` receives.

delayline run endpoints:dispatcher
delayline run endpoints:customers
"""

from datetime import UTC, datetime

from delayline import Endpoint, Headers, Message, MessageContext
from delayline.composition import endpoint_from, transport_of
from delayline.message import from_wire_time
from delayline.settings import load_settings

settings = load_settings(flags={"endpoint": "reminders"})

# No handlers: this process only moves what is due to the queue of `customers`. Start as many as you like.
dispatcher = endpoint_from(settings)

customers = Endpoint("customers", transport=transport_of(settings))


@customers.handler
async def remind(message: Message, context: MessageContext) -> None:
    """Print the message and its lateness."""
    del context
    late = datetime.now(UTC) - from_wire_time(message.headers[Headers.DELIVER_AT])
    print(f"{message.id}: {message.text} ({late.total_seconds() * 1000:.0f} ms late)", flush=True)
