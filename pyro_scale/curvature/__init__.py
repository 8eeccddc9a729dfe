"""The log density of all rows, its modes, and the curvature of likelihoods, priors and modes."""
