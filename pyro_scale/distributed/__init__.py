"""Processes that work on one run together."""
