"""What a run leaves: draws and Gaussians, predictions, ArviZ, files."""
