"""Whether a method is calibrated on a model: data sets drawn from it, fits of all of them, ranks."""
