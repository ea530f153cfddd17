"""Built-in constraints, one a file, and the engines behind them."""
