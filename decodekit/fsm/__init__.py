"""Regular languages over bytes: Python's regexes and their algebra as automata that are determinised as far as they are used."""
