"""Vectors, rows, seeds, schedules and statistics of numbers: knows no model and no method."""
