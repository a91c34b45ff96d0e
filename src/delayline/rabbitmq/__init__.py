"""RabbitMQ: a delayed message waits inside the broker, in 28 queues that each hold it for a power of two seconds."""

from delayline.errors import MissingExtra

try:
    import pamqp as _client
except ImportError as _error:
    raise MissingExtra("rabbitmq", "RabbitMQ") from _error

from delayline.rabbitmq.delivery import DelayLevelDelivery
from delayline.rabbitmq.transport import RabbitMQTransport

__all__ = ["DelayLevelDelivery", "RabbitMQTransport"]

del _client
