"""Tools for operators of RabbitMQ: verify and migrate delay levels, transfer and drain their messages."""
