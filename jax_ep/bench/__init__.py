"""Benchmarks: `python -m jax_ep bench`. Every figure in the docs comes from a record that this package wrote."""
