"""One module or group of modules for each database product."""
