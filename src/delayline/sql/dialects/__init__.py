"""What one database server truly does differently from the others."""
