"""The request-based decoding loop and the Decoder over it."""
