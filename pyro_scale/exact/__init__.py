"""Exact sampling of all rows: the log joint as one C function, and NUTS on it."""
