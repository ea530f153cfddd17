"""The cache that every strategy shares: which block of K/V belongs to whom, and what a new prompt can reuse."""
