"""Files and Zarr stores."""
