"""Results of a run: draws and Gaussians, predictions, ArviZ, files."""
