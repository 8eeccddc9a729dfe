"""Models whose local latents, one of every row or group, are summed out by quadrature."""
