"""Simulation-based calibration: tests whether posteriors are right, on average over the prior."""
