"""The log joint density of all rows of the data, the search for its modes, and its curvature."""
