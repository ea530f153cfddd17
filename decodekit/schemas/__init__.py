"""JSON Schema as grammars."""
