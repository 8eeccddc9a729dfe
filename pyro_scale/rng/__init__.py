"""Random numbers that are a function of the seed, the chain, their purpose and their place."""
