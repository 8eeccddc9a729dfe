"""Random numbers that are a function of the seed, the chain's number, their purpose and their index
in a stream, so that any of them can be drawn without those before it.
"""
