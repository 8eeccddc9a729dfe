"""The log density of all rows: its gradient, its mode, its curvature there, its evidence."""
