"""Where decodekit meets other projects: model sources, evaluation harnesses, data engines."""
