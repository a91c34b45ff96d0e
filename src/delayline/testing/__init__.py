"""For tests of delayline and of what is built on it."""
