"""Vectors, rows, seeds and schedules: knows no model and no method."""
