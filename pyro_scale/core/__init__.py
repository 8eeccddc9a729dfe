"""Vectors, rows, schedules and statistics of numbers; independent of models and methods."""
