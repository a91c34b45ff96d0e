"""Receiving: messages are taken from a queue, handled, and completed or recovered."""
