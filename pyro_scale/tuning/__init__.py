"""Tuning: chooses starts, coordinates, step size and lengths of a run, before its draws."""
