"""A run: its problem (model, data, starts), its plan, the execution of its steps, checkpoints."""
