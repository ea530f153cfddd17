"""Context-free grammars as masks, through llguidance."""
