"""Private servers for tests, started from the installed programs on free ports, so that a test may kill them."""
