"""How a message waits, whatever the technology."""
