"""The chain of a network whose weights are divided among processes (`fully_shard`): each process
has a part of every weight, and moves that part.
"""
