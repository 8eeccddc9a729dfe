"""Vectors of parameters, rows of data, schedules and statistics of numbers. Knows nothing of models
and methods.
"""
