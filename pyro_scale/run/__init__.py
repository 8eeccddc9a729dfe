"""A run: the model understood and chains at their starts, then the steps, then what goes on."""
