"""Networks as Bayesian models: which weights are latent, and their priors."""
