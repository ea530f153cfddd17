"""The chunked form of the gated delta rule on a GPU."""
