"""The dashboard of endpoints."""
