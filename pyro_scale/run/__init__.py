"""A sampler's run: its problem (model, data, starts), the plan of its steps, their execution, and
its checkpoints.
"""
